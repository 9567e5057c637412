"""The ratio test and the residual draw of standard rejection, for drafts that come with their distribution.

Fast inference from transformers via speculative decoding, arXiv 2211.17192.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.pick import cumulate, pick, rows_where
from ..kernels.row_distribution import RowDistribution, rows_in_cache
from .chunk import Chunk
from .draft_distribution import DistributionTable, distribution_tables
from .types import NO_PROPOSAL, DistributionKind, DraftDistributions, Uniforms


@dataclass(frozen=True)
class RatioTest:
    """The outcome of the test at every draft; it holds for the requests it applies to."""

    tables: dict[DistributionKind, DistributionTable]
    kind: Tensor  # [B]
    applies: Tensor  # [B, 1] bool, a distribution is reported and the request is not greedy
    accept: Tensor  # [B, W] bool
    prob: Tensor  # [B, W] float64, min(1, p/q)


def ratio_test(
    target_prob: Tensor,
    vocab_size: int,
    chunk: Chunk,
    distributions: DraftDistributions,
    greedy: Tensor | None,
    uniforms: Uniforms,
) -> RatioTest:
    """Accept where p > 0 and (p >= q or u * q < p): no division, no logarithm, and p == q accepts for every u.

    Where q is 0 the draft was not drawn from its expected growth, and nothing is accepted.

    target_prob [B, W] is p of each draft, 0 for an id outside the vocabulary; greedy [B] marks requests that use no
    distribution. A row tagged with a form of which no tensor is given is verified as one-hot: lossless for any draft.
    """
    assert uniforms.accept is not None, "rows with a reported distribution need accept uniforms"
    num_drafts = uniforms.accept.shape[1]
    tables = distribution_tables(distributions, chunk.drafts_to_verify(num_drafts))
    token_ids = chunk.token_ids.clamp(0, vocab_size - 1)
    places = chunk.places.clamp(max=num_drafts - 1)
    draft_prob = torch.zeros_like(target_prob)
    applies = torch.zeros_like(distributions.kind, dtype=torch.bool)
    for kind, table in tables.items():
        of_kind = distributions.kind == kind
        applies |= of_kind
        draft_prob = torch.where(of_kind.unsqueeze(1), table.prob_of(token_ids, places), draft_prob)
    if greedy is not None:
        applies &= ~greedy
    possible = (target_prob > 0) & (draft_prob != 0)
    likelier = (target_prob >= draft_prob) | (uniforms.accept[:, places] * draft_prob < target_prob)
    return RatioTest(
        tables=tables,
        kind=distributions.kind,
        applies=applies.unsqueeze(1),
        accept=likelier & possible,
        prob=torch.where(possible, (target_prob / draft_prob).clamp_(max=1.0), 0.0),
    )


@dataclass(frozen=True)
class Recovered:
    """What the residual gives at the stops of the requests that the test stopped at a draft."""

    token_ids: Tensor  # [B]
    found: Tensor  # [B] bool, the token is to be emitted
    empty: Tensor  # [B] bool, the residual has no mass
    mass: Tensor  # [B] float32, of the residual; NaN where none was needed


def recover(
    test: RatioTest, distribution: RowDistribution, chunk: Chunk, uniforms: Uniforms, num_accepted: Tensor
) -> Recovered:
    """Draw from (p - q)+ for every request that the test stopped at a draft of this chunk."""
    stops = chunk.going & (num_accepted < len(chunk.places))
    stop = num_accepted.clamp(max=len(chunk.places) - 1).unsqueeze(1)
    drawn = chunk.token_ids != NO_PROPOSAL
    rejected = stops & (test.applies & drawn.gather(1, stop)).squeeze(1)
    rows = chunk.rows.gather(1, stop).squeeze(1)
    if distribution.bad is not None:
        rejected &= ~distribution.bad[rows]
    places = chunk.places[stop.squeeze(1)]
    drawn = uniforms.output.gather(1, places.unsqueeze(1)).squeeze(1)
    token_ids = torch.zeros_like(num_accepted)
    mass = torch.full_like(num_accepted, torch.nan, dtype=torch.float64)
    for kind, table in test.tables.items():
        wanted = rejected & (test.kind == kind)
        chosen = rows_where(wanted)
        for requests in torch.split(chosen, rows_in_cache(distribution.vocab_size, chosen)) if chosen.numel() else ():
            weights = distribution.probs(rows[requests])
            of_drafts = places[requests].clamp(max=uniforms.output.shape[1] - 2)
            table.subtract(weights.flatten(1)[:, : distribution.vocab_size], requests, of_drafts)
            cdf = cumulate(weights.clamp_(min=0.0))
            found = pick(weights, cdf, drawn[requests]).clamp_(max=distribution.vocab_size - 1)
            token_ids[requests] = torch.where(wanted[requests], found, token_ids[requests])
            mass[requests] = torch.where(wanted[requests], cdf[:, -1], mass[requests])
    return Recovered(token_ids, mass > 0, rejected & ~(mass > 0), mass.float())
