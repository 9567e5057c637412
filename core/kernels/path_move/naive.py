"""Moving the keys and values of accepted nodes in plain torch; the kernel beside it leaves the same behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from . import Paths


def move_paths(stored: Sequence[Tensor], table: Tensor, paths: Paths) -> None:
    """See the package. All are read before one is written.

    Behind the end of a path its last node is written again; where there is none, node 0 is written to itself.
    """
    count = (paths.places > 0).sum(1, keepdim=True)
    depths = torch.arange(paths.places.shape[1] - 1, device=count.device).minimum(count - 1).clamp(min=0)
    nodes = torch.where(count > 0, paths.places[:, 1:].gather(1, depths) - 1, 0)
    sources, destinations = (_slots(paths, each).flatten() for each in (nodes, depths))
    for each in stored:
        each.index_copy_(0, destinations, each.index_select(0, sources))


def _slots(paths: Paths, nodes: Tensor) -> Tensor:
    positions = paths.first[:, None] + nodes
    column = (positions // paths.block_size).clamp(max=paths.block_table.shape[1] - 1)
    return paths.block_table.gather(1, column).long() * paths.block_size + positions % paths.block_size
