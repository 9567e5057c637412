"""Keys and values of the accepted nodes of trees, moved to where those of a chain lie.

A node lies at its number behind the newest token, and belongs at its depth. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Paths:
    """The accepted paths of B requests, and where their nodes lie."""

    places: Tensor  # [B, 1 + D] int64: 0, then the number of each accepted node plus 1, -1 padded
    first: Tensor  # [B] position of node 0
    block_table: Tensor  # [B, P] int32
    block_size: int
