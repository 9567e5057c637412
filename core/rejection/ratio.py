"""The ratio test and the residual draw of standard rejection, and the forms of draft distribution that they read.

Fast inference from transformers via speculative decoding, arXiv 2211.17192.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.pick import cumulate, pick, rows_where
from ..kernels.row_distribution import RowDistribution, row_distribution, rows_in_cache, scale_of
from .layout import Chunk
from .types import NO_PROPOSAL, DistributionKind, DraftDistributions, Uniforms


@dataclass(frozen=True)
class RatioTest:
    """The outcome of the test at every draft; it holds for the requests it applies to."""

    tables: dict[DistributionKind, DistributionTable]
    kind: Tensor  # [B]
    applies: Tensor  # [B, 1] bool, a distribution is reported and the request is not greedy
    accept: Tensor  # [B, W] bool


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
    )


@dataclass(frozen=True)
class Recovered:
    """What the residual gives at the stops of the requests that the test stopped at a draft."""

    token_ids: Tensor  # [B]
    found: Tensor  # [B] bool, the token is to be emitted
    empty: Tensor  # [B] bool, the residual has no mass


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
            weights.flatten(1)[:, : distribution.vocab_size].sub_(table.of(requests, of_drafts, distribution))
            cdf = cumulate(weights.clamp_(min=0.0))
            found = pick(weights, cdf, drawn[requests]).clamp_(max=distribution.vocab_size - 1)
            token_ids[requests] = torch.where(wanted[requests], found, token_ids[requests])
            mass[requests] = torch.where(wanted[requests], cdf[:, -1], mass[requests])
    return Recovered(token_ids, mass > 0, rejected & ~(mass > 0))


@dataclass(frozen=True)
class DenseTable:
    """Distributions as probabilities over a draft vocabulary."""

    probs: Tensor  # [B, K, Vq]
    t2d: Tensor | None  # [V]

    def prob_of(self, token_ids: Tensor, places: Tensor) -> Tensor:
        """q, float64 [B, W], of token_ids [B, W] at places [W] or [B, W]: all of them ids of the target."""
        draft_ids, known = _draft_ids(token_ids, self.t2d, self.probs.shape[2])
        return torch.where(known, self.probs[_requests(token_ids), places, draft_ids].double(), 0.0)

    def of(self, requests: Tensor, places: Tensor, target: RowDistribution) -> Tensor:
        """The distribution of each (request, place) pair, int64 [M], as new numbers [M, V] like the target's."""
        return _over_targets(self.probs[requests, places].to(target.weights.dtype), self.t2d, target.vocab_size)


@dataclass(frozen=True)
class LogitsTable:
    """Distributions made of logits over a draft vocabulary, where they are wanted."""

    distribution: RowDistribution  # of N rows
    rows: Tensor  # [B, K] the row of each place
    t2d: Tensor | None  # [V]

    def prob_of(self, token_ids: Tensor, places: Tensor) -> Tensor:
        draft_ids, known = _draft_ids(token_ids, self.t2d, self.distribution.vocab_size)
        rows = self.rows[_requests(token_ids), places]
        probs = self.distribution.weights.flatten(1)[rows, draft_ids].double() / self._mass(rows)
        return torch.where(known, probs, 0.0)

    def of(self, requests: Tensor, places: Tensor, target: RowDistribution) -> Tensor:
        rows, dtype = self.rows[requests, places], target.weights.dtype
        distribution = self.distribution.weights[rows].flatten(1)[:, : self.distribution.vocab_size].to(dtype)
        distribution.div_(self._mass(rows).to(dtype).unsqueeze(1))
        return _over_targets(distribution, self.t2d, target.vocab_size)

    def _mass(self, rows: Tensor) -> Tensor:
        """NaN where the logits are no distribution."""
        mass = self.distribution.mass.squeeze(1)[rows]
        return mass if self.distribution.bad is None else mass.masked_fill(self.distribution.bad[rows], torch.nan)


@dataclass(frozen=True)
class SparseTable:
    """Distributions as a few target ids and their probabilities; every other id has probability 0."""

    ids: Tensor  # [B, K, M], -1 padded
    probs: Tensor  # [B, K, M]

    def prob_of(self, token_ids: Tensor, places: Tensor) -> Tensor:
        at = _requests(token_ids), places
        same = self.ids[at] == token_ids.unsqueeze(2)
        return torch.where(same, self.probs[at], 0.0).sum(2, dtype=torch.float64)

    def of(self, requests: Tensor, places: Tensor, target: RowDistribution) -> Tensor:
        ids = self.ids[requests, places]  # [M, top_m]
        probs = self.probs[requests, places].to(target.weights.dtype)
        known = (ids >= 0) & (ids < target.vocab_size)
        distribution = target.weights.new_zeros(len(ids), target.vocab_size)
        return distribution.scatter_add_(1, torch.where(known, ids, 0), torch.where(known, probs, 0.0))


DistributionTable = DenseTable | LogitsTable | SparseTable
"""A form of draft distribution, over the places of B requests."""


def distribution_tables(distributions: DraftDistributions, wanted: Tensor) -> dict[DistributionKind, DistributionTable]:
    """The forms of distribution present in this batch; logits become distributions only at the wanted places, bool
    [B, K].
    """
    tables: dict[DistributionKind, DistributionTable] = {}
    if distributions.draft_probs is not None:
        tables[DistributionKind.DENSE_PROBS] = DenseTable(distributions.draft_probs, distributions.t2d)
    if distributions.draft_logits is not None:
        rows = rows_where((wanted & (distributions.kind == DistributionKind.DENSE_LOGITS).unsqueeze(1)).flatten())
        if rows.numel():
            tables[DistributionKind.DENSE_LOGITS] = _logits_table(distributions.draft_logits, rows, distributions.t2d)
    if distributions.sparse_ids is not None and distributions.sparse_probs is not None:
        tables[DistributionKind.SPARSE] = SparseTable(distributions.sparse_ids, distributions.sparse_probs)
    return tables


def _logits_table(logits: Tensor, rows: Tensor, t2d: Tensor | None) -> LogitsTable:
    """The distributions of some of logits [B, K, Vq], whose places are numbered by rows."""
    batch, num_drafts, draft_vocab = logits.shape
    scale = scale_of(torch.ones(1, device=logits.device)).expand(len(rows))
    every = len(rows) == batch * num_drafts
    distribution = row_distribution(logits.reshape(-1, draft_vocab), scale, rows=None if every else rows)
    index = torch.zeros(batch * num_drafts, dtype=torch.int64, device=logits.device)
    index[rows] = torch.arange(len(rows), device=logits.device)
    return LogitsTable(distribution, index.view(batch, num_drafts), t2d)


def _requests(token_ids: Tensor) -> Tensor:
    return torch.arange(len(token_ids), device=token_ids.device).unsqueeze(1)


def _draft_ids(token_ids: Tensor, t2d: Tensor | None, draft_vocab: int) -> tuple[Tensor, Tensor]:
    """(draft ids, clamped to the draft vocabulary; whether they are in it) of target ids."""
    draft_ids = token_ids if t2d is None else t2d[token_ids]
    known = (draft_ids >= 0) & (draft_ids < draft_vocab)
    return draft_ids.clamp(0, draft_vocab - 1), known


def _over_targets(distribution: Tensor, t2d: Tensor | None, vocab_size: int) -> Tensor:
    """Distributions [M, Vq] over draft ids as such [M, V] over target ids."""
    if t2d is not None:
        return torch.where(t2d >= 0, distribution[:, t2d.clamp(min=0)], 0.0)
    beyond = vocab_size - distribution.shape[1]
    return pad(distribution, (0, beyond)) if beyond else distribution
