"""The uniforms of a step's drafts in plain torch; the kernel beside it gives the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..philox import Stream, uniform


def draft_uniforms(keys: Tensor, positions: Tensor, count: int) -> Tensor:
    """float64 [count, B] for draft keys and positions, int64 [B]."""
    steps = torch.arange(count, device=keys.device).unsqueeze(1)
    return uniform(keys, positions, Stream.DRAFT, steps)
