"""The backend of a GPU: kernels in Triton, block tables that lie on the device, and captured passes."""
