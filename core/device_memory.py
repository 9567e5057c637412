"""How much memory a device has free, how much a piece of work takes at most, and memory that is taken when touched."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import psutil
import torch
from torch import Tensor

CGROUP = Path("/sys/fs/cgroup")
"""Where a container reads its limits (cgroup v2)."""

NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which `mmap` names since Python 3.13."""


class CudaMemory:
    """The memory of one CUDA device, as PyTorch's allocator and the driver see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """Bytes there are."""
        return torch.cuda.mem_get_info(self._device)[1]

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes in use at most while the work runs, those of other processes and libraries included."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()  # what is left in use by others is then what the driver counts beyond our own
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device) + reserved


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now; on a CPU, memory that only caches files counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(min(psutil.virtual_memory().available, _left_to_container()))


def _left_to_container() -> float:
    """Bytes below a container's limit, counted likewise; without a limit, infinity."""
    try:
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(limit - used + int(counts["active_file"]) + int(counts["inactive_file"]), 0)
    except (OSError, ValueError):  # of "max", which is no number
        return math.inf


def spare_memory(device: torch.device) -> int:
    """A quarter of the free memory, in bytes: what may be taken unasked, as other processes use it too."""
    return free_memory(device) // 4


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU its pages are committed when they are first touched.

    On Linux a fork writes to its own. Nothing is reserved: Linux refuses to fork where that is more than there is.
    """
    if device.type != "cpu" or not prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE} if sys.platform == "linux" else {}
    return torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize, **private), dtype=dtype).view(*shape)
