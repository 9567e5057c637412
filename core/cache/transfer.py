"""Numbers on their way to a device, without the host waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
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
