"""Numbers on their way to a device, without the host waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. On a device each list begins at a multiple: a kernel is compiled again for pointers that do not."""
Lists = Sequence[Sequence[float]]


def upload(lists: Lists, device: torch.device, floats: Lists = ()) -> list[Tensor]:
    """Lists as int64, then `floats` as float32: one tensor each, all in one transfer.

    From pinned memory: copies from any other are waited for. On a CPU by way of NumPy, which reads a list of numbers
    four times as fast as torch.
    """
    if device.type == "cpu":
        return [*_on_host(lists, np.int64), *(_on_host(floats, np.float32) if floats else ())]
    integers, sizes = aligned(lists, ALIGNMENT // 8)
    singles, single_sizes = aligned(floats, ALIGNMENT // 4)
    staged = torch.empty(8 * len(integers) + 4 * len(singles), dtype=torch.uint8, pin_memory=True)
    for place, numbers in zip(_parts(staged, len(integers)), (integers, singles), strict=True):
        place.numpy()[:] = numbers
    sent = _parts(staged.to(device, non_blocking=True), len(integers))
    return [*_apart(sent[0], sizes), *(_apart(sent[1], single_sizes) if floats else ())]


class RowLists:
    """A list of integers for each row of an engine, kept on a device from step to step: only what is new is sent.

    Within a generation of a row its list only grows.
    """

    def __init__(self, table: Tensor, pad: int | None = None) -> None:
        """table [rows, most]. pad: what stands behind a list. None means anything."""
        self.table = table
        self._pad = [] if pad is None else [pad]
        self._sent: dict[int, tuple[int, int]] = {}  # by row: generation, numbers of its list that are there
        self._coming: dict[int, tuple[int, int]] = {}  # the same of what `write` writes

    def changes(self, owned: Iterable[tuple[int, int, Sequence[int]]]) -> tuple[list[int], list[int]]:
        """Places in the flat table, and what is missing there, for `write`. owned: row, generation and list of each."""
        self._coming = {}
        places: list[int] = []
        entries: list[int] = []
        for row, generation, values in owned:
            of, count = self._sent.get(row, (generation, 0))
            same = count if of == generation else 0
            if same != count or same != len(values):
                new = [*values[same:], *self._pad * (count - len(values))]
                first = row * self.table.shape[1] + same
                places += range(first, first + len(new))
                entries += new
                self._sent[row] = -1, max(count, len(values))  # until `write`, after which an interrupt may come
                self._coming[row] = generation, len(values)
        return places, entries

    def write(self, places: Tensor, entries: Tensor) -> None:
        """Put entries [n] at their places [n]: the last `changes`."""
        if len(places):
            self.table.view(-1).index_copy_(0, places, entries.to(self.table.dtype))
        self._sent |= self._coming


def _on_host(lists: Lists, dtype: type[np.generic]) -> Sequence[Tensor]:
    flat = torch.as_tensor(np.fromiter(chain.from_iterable(lists), dtype))
    return flat.split_with_sizes(list(map(len, lists)))


def _parts(packed: Tensor, num_integers: int) -> tuple[Tensor, Tensor]:
    """The integers and the floats of packed bytes."""
    return packed[: 8 * num_integers].view(torch.int64), packed[8 * num_integers :].view(torch.float32)


def _apart(packed: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The lists of a packing, without the gaps."""
    return torch.split(packed, sizes)[::2]


def aligned(lists: Lists, multiple: int) -> tuple[list[float], list[int]]:
    """The lists one behind the other, each beginning at a multiple; sizes of list, gap, list, gap, ..."""
    padded: list[float] = []
    sizes: list[int] = []
    for values in lists:
        gap = -len(values) % multiple
        padded += [*values, *[0] * gap]
        sizes += [len(values), gap]
    return padded, sizes
