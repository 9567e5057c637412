"""The entries of the tokens that survived, without those of rejected drafts between them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .extensions import RejectedTokens
from .types import KeptTokens


def compacted(kept: KeptTokens) -> KeptTokens:
    """The host form of kept tokens: every entry was kept. On a device it waits."""
    entries, bounds = _places(kept.token_offsets[:-1], kept.num_kept)
    return replace(
        kept,
        token_offsets=bounds,
        positions=kept.positions[entries],
        token_ids=kept.token_ids[entries],
        next_token_ids=kept.next_token_ids[entries],
        hidden=tuple([state[entries] for state in kept.hidden]),
        top_ids=None if kept.top_ids is None else kept.top_ids[entries],
        top_logprobs=None if kept.top_logprobs is None else kept.top_logprobs[entries],
    )


def compacted_rejects(rejected: RejectedTokens) -> RejectedTokens:
    """The host form of rejected tokens. On a device it waits."""
    entries, bounds = _places(rejected.start, rejected.num_rejected)
    return replace(
        rejected,
        start=bounds[:-1],
        positions=rejected.positions[entries],
        token_ids=rejected.token_ids[entries],
        top_ids=rejected.top_ids[entries],
        top_logprobs=rejected.top_logprobs[entries],
    )


def _places(start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The entries `start[b] : start[b] + count[b]` of all requests, and the bounds of each among them: [n], [B+1]."""
    bounds = torch.cat([count.new_zeros(1), count.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    return start[owner] + torch.arange(len(owner), device=count.device) - bounds[owner], bounds
