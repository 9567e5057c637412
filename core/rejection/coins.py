"""Which random numbers judge a step: those of the request seeds, by position and purpose."""

from __future__ import annotations

import torch

from ..kernels.philox import Stream, uniform
from .types import Coins, DraftRows, SamplingRows


def draw_coins(drafts: DraftRows, sampling: SamplingRows) -> Coins:
    """The coins of the request seeds at every place; only those up to a request's stop are ever used."""
    offsets = torch.arange(drafts.token_ids.shape[1] + 1, device=sampling.position.device)
    positions = sampling.position.unsqueeze(1) + offsets
    seeds = sampling.seed.unsqueeze(1)
    if drafts.laws is None:
        return Coins(output=uniform(seeds, positions, Stream.RESAMPLE))
    streams = torch.arange(Stream.ACCEPT, Stream.RESAMPLE + 1, device=positions.device).view(2, 1, 1)
    accept, output = uniform(seeds, positions, streams)
    return Coins(output=output, accept=accept[:, :-1])


def draw_block_coins(drafts: DraftRows, sampling: SamplingRows) -> Coins:
    """As `draw_coins` for block verification, which spends all its coins in every step.

    The next step judges other drafts at the same positions, so a coin is also told apart by its place in the block.
    """
    places = torch.arange(drafts.token_ids.shape[1], device=sampling.position.device)
    positions = sampling.position.unsqueeze(1) + places
    accept = uniform(sampling.seed.unsqueeze(1), positions, Stream.ACCEPT, places + 1)
    return Coins(output=draw_coins(drafts, sampling).output, accept=accept)
