"""A CUDA device that is not there: `emulated_cuda` in `install.py`; `cuda.py` says what it refuses and counts."""

from .counts import Counts
from .cuda import EmulatedCuda, WrongDevice
from .engine import plain_kernels
from .guard import can_be_had
from .install import GIB, emulated_cuda

__all__ = ["GIB", "Counts", "EmulatedCuda", "WrongDevice", "can_be_had", "emulated_cuda", "plain_kernels"]
