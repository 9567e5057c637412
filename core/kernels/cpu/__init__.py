"""What computes on a CPU: attention over spans, linear layers and norms, by PyTorch or by kernels in C."""
