"""The paths in trees as a Triton kernel: one launch, in which every node goes up to the root."""

# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import STREAMING

MOST_NODES = 64
"""Of a tree. Fewer would take as long, and be another kernel to compile."""


@triton.jit(do_not_specialize=["parents_ptr", "width"])
def tree_masks_kernel(parents_ptr, ancestors_ptr, depths_ptr, width, NODES: tl.constexpr):
    """Grid [B]."""
    nodes = tl.arange(0, NODES)
    first = tl.program_id(0).to(tl.int64) * width
    at = tl.where(nodes < width, nodes, -1).to(tl.int64)
    ancestors = tl.full([NODES], 0, tl.int64)
    depths = tl.full([NODES], 0, tl.int32)
    while tl.max(at, 0) >= 0:
        on_path = at >= 0
        ancestors |= tl.where(on_path, tl.full([NODES], 1, tl.int64) << tl.maximum(at, 0), 0)
        depths += on_path.to(tl.int32)
        above = tl.load(parents_ptr + first + at, mask=on_path, other=-1)
        at = tl.where(above < at, above, -1)
    tl.store(ancestors_ptr + first + nodes, ancestors, mask=nodes < width)
    tl.store(depths_ptr + first + nodes, depths, mask=nodes < width)


def tree_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Make the masks of trees in one launch."""
    parents = parents.contiguous()
    ancestors, depths = torch.empty_like(parents), torch.empty_like(parents, dtype=torch.int32)
    count, width = parents.shape
    tree_masks_kernel[(count,)](parents, ancestors, depths, width, MOST_NODES, **STREAMING)
    return ancestors, depths
