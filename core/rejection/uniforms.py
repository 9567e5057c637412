"""Which random numbers verify a step: those of the request seeds, by position and purpose."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.philox import Stream, uniform
from .types import DraftRows, SamplingRows, Uniforms


def draw_uniforms(drafts: DraftRows, sampling: SamplingRows) -> Uniforms:
    """The uniforms of the request seeds at every place; only those up to a request's stop are ever used."""
    offsets = torch.arange(drafts.token_ids.shape[1] + 1, device=sampling.position.device)
    positions = sampling.position.unsqueeze(1) + offsets
    seeds = sampling.seed.unsqueeze(1)
    if drafts.distributions is None:
        return Uniforms(output=uniform(seeds, positions, Stream.RESAMPLE))
    streams = torch.arange(Stream.ACCEPT, Stream.RESAMPLE + 1, device=positions.device).view(2, 1, 1)
    accept, output = uniform(seeds, positions, streams)
    return Uniforms(output=output, accept=accept[:, :-1])


def draw_tree_uniforms(drafts: DraftRows, sampling: SamplingRows, depths: Tensor, *, together: bool) -> Uniforms:
    """Draw uniforms for trees, those of blocks where `together`. On a chain they are the numbers of `draw_uniforms`.

    depths [B, K + 1]: nodes on the path to each place. The token at a place has the number of its position, so that it
    is the token of plain decoding. A node is told apart by its place in the tree, as another node of its position may
    be verified now or in the next step. Only a node that all earlier ones lead to is told apart by its position alone.
    """
    seeds, first = sampling.seed.unsqueeze(1), sampling.position.unsqueeze(1)
    output = uniform(seeds, first + depths, Stream.RESAMPLE)
    if drafts.distributions is None:
        return Uniforms(output=output)
    nodes = torch.arange(drafts.token_ids.shape[1], device=depths.device)
    turn = nodes + 1
    if not together:
        turn = torch.where(depths[:, 1:] == turn, 0, turn)
    return Uniforms(output=output, accept=uniform(seeds, first + nodes, Stream.ACCEPT, turn))
