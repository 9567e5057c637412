"""Layers of a network in fewer kernels: what waits for its reader, and the kernels that compute both."""
