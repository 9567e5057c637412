"""Trees of drafts over stored keys and values, in plain torch: what each node sees, and where accepted nodes go.

A node lies at its number behind the newest token, and belongs at its depth. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Paths:
    """The accepted paths of B requests, and where their nodes lie."""

    places: Tensor  # [B, 1 + D] int64: 0, then the number of each accepted node plus 1, -1 padded
    first: Tensor  # [B] position of node 0
    block_table: Tensor  # [B, P] int32
    block_size: int


def tree_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Which nodes lie on the path to each node, of parents int64 [B, W], W at most 64.

    Returns ancestors [B, W] int64, whose bit j says that node j lies on the path, itself included, and depths [B, W]
    int32, the number of these nodes. A parent that is no earlier node stands for the root.
    """
    nodes = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    above = torch.where(parents < nodes, parents, -1)
    ancestors, depths = torch.zeros_like(parents), torch.zeros_like(parents, dtype=torch.int32)
    at = nodes
    for _ in range(parents.shape[1]):
        on_path = at >= 0
        ancestors |= torch.where(on_path, 1 << at.clamp(min=0), 0)
        depths += on_path
        at = torch.where(on_path, above.gather(1, at.clamp(min=0)), -1)
    return ancestors, depths


def move_paths(stored: Sequence[Tensor], table: Tensor, paths: Paths) -> None:
    """Move the keys and values of accepted nodes to where those of a chain lie. All are read before one is written.

    stored: tensors [slots, heads, dim]. table [len, 2] int64: their addresses and bytes per slot, for kernels.
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
