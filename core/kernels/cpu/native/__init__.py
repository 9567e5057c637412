"""Kernels in C for a CPU, compiled by the machine's own compiler when they are first asked for."""
