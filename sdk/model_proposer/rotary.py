"""The rotary position embedding of transformers' networks, for keys that are written by hand."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys [N, heads, head_dim] with their positions in them.

    rotary: cos and sin, [1, N, head_dim] each, as the rotary embedding of a decoder gives them for [1, N] positions.
    """
    cos, sin = (each[0, :, None] for each in rotary)
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin
