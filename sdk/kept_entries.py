"""Kept entries in the place of those of rejected drafts, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_entries(token_offsets: Tensor, num_kept: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """Compute what `KeptTokens.entries` returns."""
    entries = torch.arange(num_entries, device=token_offsets.device)
    owner = torch.searchsorted(token_offsets[1:], entries, right=True).clamp(max=num_kept.shape[0] - 1)
    offset = (entries - token_offsets[owner]).clamp(min=0).minimum(num_kept[owner] - 1)
    return token_offsets[owner] + offset, owner
