"""The driver that Triton asks for a device; interpreted kernels run where their tensors are."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    """Active everywhere."""

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError("nothing is compiled")

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_benchmarker(self):
        raise NotImplementedError("nothing is timed")

    def get_empty_cache_for_benchmark(self):
        raise NotImplementedError("nothing is timed")

    def clear_cache(self, cache):
        raise NotImplementedError("nothing is timed")
