"""Hidden states that an engine hands to its proposer's process, in memory that both of them have mapped."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .types import TargetInfo


class SharedStates:
    """Rows of one width, from the first on. One side writes them, then the other reads them, then there are others.

    The memory is no file with a name, so that it is gone with the last process that has it.
    """

    def __init__(self, target: TargetInfo, num_states: int, descriptor: int | None = None) -> None:
        """`num_states`: of each position, side by side. `descriptor`: of memory that another process made. None means
        that it is made here.
        """
        self._dtype: torch.dtype = getattr(torch, target.dtype)
        self._width = num_states * target.hidden_size
        self._mapped = torch.empty(0, self._width, dtype=self._dtype)  # the memory as rows, as far as it was used
        self.descriptor = os.memfd_create("specdec-states") if descriptor is None else descriptor
        weakref.finalize(self, os.close, self.descriptor)

    def write(self, parts: Sequence[Tensor]) -> None:
        """Write the rows [n, width] of each part, one part behind the other."""
        count = sum(map(len, parts))
        size = count * self._width * self._dtype.itemsize
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)
        torch.cat([*parts], out=self._rows(count))

    def read(self, count: int) -> Tensor:
        """A copy of the first `count` rows. Raises ValueError if there are fewer."""
        return self._rows(count).clone()

    def _rows(self, count: int) -> Tensor:
        if count > len(self._mapped):
            row, size = self._width * self._dtype.itemsize, os.fstat(self.descriptor).st_size
            if count * row > size:
                raise ValueError(f"{count} rows of {row} bytes were announced, and there are {size} bytes")
            memory = mmap.mmap(self.descriptor, size)
            held = torch.frombuffer(memory, dtype=self._dtype, count=size // row * self._width)
            self._mapped = held.view(-1, self._width)
        return self._mapped[:count]
