"""A device's memory: how much is in use, and the pool of graphs, whose stretches are used again.

A stretch is free when the last tensor upon it is gone. Ordinary tensors have real memory of their own, so only their
sizes count here. Tensors made inside a capture lie in the pool: one stretch serves several graphs there, and the replay
of one really overwrites what another left in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

import torch
from torch import Tensor

SMALLEST = 512  # bytes; sizes are rounded up to a multiple
MIB = 1 << 20
POISON = 0xFF  # NaN as a float, -1 as an integer


class Owner(Protocol):
    """Whoever takes a stretch back."""

    def give(self, start: int, size: int) -> None: ...


class Stretch:
    """Memory that tensors share; it goes back to its owner with the last of them."""

    def __init__(self, owner: Owner, start: int, size: int) -> None:
        self.owner, self.start, self.size = owner, start, size

    def __del__(self) -> None:
        self.owner.give(self.start, self.size)


class Heap:
    """Counts the bytes of one device. Raises torch.cuda.OutOfMemoryError as a device does."""

    def __init__(self, total: int) -> None:
        self.total, self.used, self.peak = total, 0, 0

    def take(self, num_bytes: int) -> Stretch:
        size = -(-num_bytes // SMALLEST) * SMALLEST
        if self.used + size > self.total:
            raise torch.cuda.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes; {self.total - self.used} of {self.total} are free"
            )
        self.used += size
        self.peak = max(self.peak, self.used)
        return Stretch(self, 0, size)

    def give(self, start: int, size: int) -> None:
        self.used -= size


class Pool:
    """The memory of graphs, by the rules of torch's allocator: best fit, stretches split and merged, in segments."""

    def __init__(self, heap: Heap, *, poison: bool) -> None:
        """poison: whether memory that nobody may read any more is filled with what shows."""
        self._heap, self._poison = heap, poison
        self._free: list[tuple[int, int]] = []  # size, start; sorted
        self._segments: list[tuple[int, Tensor, Stretch]] = []  # start, bytes, what they take of the heap
        self._top = 0

    def take(self, num_bytes: int) -> Stretch:
        size = max(SMALLEST, -(-num_bytes // SMALLEST) * SMALLEST)
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free):
            self._grow(size)
            at = bisect_left(self._free, (size, -1))
        found, start = self._free.pop(at)
        if found > size:
            insort(self._free, (found - size, start + size))
        return Stretch(self, start, size)

    def _grow(self, size: int) -> None:
        segment = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self._segments.append((self._top, torch.empty(segment, dtype=torch.uint8), self._heap.take(segment)))
        insort(self._free, (segment, self._top))
        self._top += segment + SMALLEST  # segments do not touch: nothing is merged across them

    def give(self, start: int, size: int) -> None:
        if self._poison:
            self.bytes_of(start, size).fill_(POISON)
        for neighbour in list(self._free):
            if neighbour[1] + neighbour[0] == start or start + size == neighbour[1]:
                self._free.remove(neighbour)
                start, size = min(start, neighbour[1]), size + neighbour[0]
        insort(self._free, (size, start))

    def bytes_of(self, start: int, size: int) -> Tensor:
        """The memory itself, [size] uint8."""
        base, segment, _ = next(each for each in self._segments if each[0] <= start < each[0] + len(each[1]))
        return segment[start - base : start - base + size]

    def place(self, stretch: Stretch, like: Tensor) -> Tensor:
        """A tensor upon a stretch, of another's dtype, shape and strides, with its values."""
        num_bytes = size_of(like)
        flat = self.bytes_of(stretch.start, stretch.size)[:num_bytes].view(like.dtype)
        return flat.as_strided(like.shape, like.stride()).copy_(like)

    def spoil(self, used: list[tuple[int, int]], kept: list[tuple[int, int]]) -> None:
        """Fill what a replay used with what shows, but for the stretches that somebody keeps."""
        if not self._poison:
            return
        saved = [(self.bytes_of(*each), self.bytes_of(*each).clone()) for each in kept]
        for each in used:
            self.bytes_of(*each).fill_(POISON)
        for place, values in saved:
            place.copy_(values)


def size_of(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def merged(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same memory in as few stretches as there can be."""
    whole: list[tuple[int, int]] = []
    for start, size in sorted(set(stretches)):
        if whole and start <= whole[-1][0] + whole[-1][1]:
            begin, before = whole[-1]
            whole[-1] = begin, max(before, start + size - begin)
        else:
            whole.append((start, size))
    return whole
