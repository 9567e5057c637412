"""Which form of moving paths serves a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from . import Paths, naive

MovePaths = Callable[[Sequence[Tensor], Tensor, Paths], None]
"""Of stored tensors [slots, heads, dim], and a table [len, 2] int64 of their addresses and bytes per slot."""


@cache
def _of_a_device() -> MovePaths:
    """One launch, where triton is installed. Imported here because a CPU needs none of it."""
    if find_spec("triton") is None:
        return naive.move_paths
    from . import kernel

    return kernel.move_paths


def _on_cuda(stored: Sequence[Tensor], table: Tensor, paths: Paths) -> None:
    _of_a_device()(stored, table, paths)


MOVE_PATHS: dict[str, MovePaths] = {"cpu": naive.move_paths, "cuda": _on_cuda}
