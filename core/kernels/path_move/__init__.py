"""Keys and values of the accepted nodes of trees, moved to where those of a chain lie: which form serves a device.

A node lies at its number behind the newest token, and belongs at its depth. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from . import naive


@dataclass(frozen=True)
class Paths:
    """The accepted paths of B requests, and where their nodes lie."""

    places: Tensor  # [B, 1 + D] int64: 0, then the number of each accepted node plus 1, -1 padded
    first: Tensor  # [B] position of node 0
    block_table: Tensor  # [B, P] int32
    block_size: int


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
