"""The paths in trees in plain torch; the kernel beside it gives the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """See the package. One level of all trees at a time."""
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
