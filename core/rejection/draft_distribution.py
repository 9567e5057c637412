"""Reading reported draft distributions in batch: the probability of the drafted ids, and whole distributions for the
residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.pick import rows_where
from ..kernels.row_distribution import RowDistribution, row_distribution, scale_of
from .types import DistributionKind, DraftDistributions


class DistributionTable(Protocol):
    """One form of draft distribution, over the places of B requests."""

    def prob_of(self, token_ids: Tensor, places: Tensor) -> Tensor:
        """q of token_ids [B, W] (target ids, all within the target vocabulary) at places [W]; float64 [B, W]."""

    def subtract(self, weights: Tensor, requests: Tensor, places: Tensor) -> None:
        """Subtract the distribution of each (request, place) pair, int64 [M], from weights [M, V] in place."""


@dataclass(frozen=True)
class DenseTable:
    """Distributions as probabilities over a draft vocabulary."""

    probs: Tensor  # [B, K, Vq]
    t2d: Tensor | None  # [V]

    def prob_of(self, token_ids: Tensor, places: Tensor) -> Tensor:
        draft_ids, known = _draft_ids(token_ids, self.t2d, self.probs.shape[2])
        return torch.where(known, self.probs[_requests(token_ids), places, draft_ids].double(), 0.0)

    def subtract(self, weights: Tensor, requests: Tensor, places: Tensor) -> None:
        _subtract(weights, self.probs[requests, places].to(weights.dtype), self.t2d)


@dataclass(frozen=True)
class LogitsTable:
    """Distributions made of logits over a draft vocabulary, where they are wanted."""

    distribution: RowDistribution  # of N rows
    rows: Tensor  # [B, K] the row of each place
    t2d: Tensor | None  # [V]

    def prob_of(self, token_ids: Tensor, places: Tensor) -> Tensor:
        draft_ids, known = _draft_ids(token_ids, self.t2d, self.distribution.vocab_size)
        rows = self.rows[:, places]
        probs = self.distribution.weights.flatten(1)[rows, draft_ids].double() / self._mass(rows)
        return torch.where(known, probs, 0.0)

    def subtract(self, weights: Tensor, requests: Tensor, places: Tensor) -> None:
        rows = self.rows[requests, places]
        distribution = self.distribution.weights[rows].flatten(1)[:, : self.distribution.vocab_size].to(weights.dtype)
        _subtract(weights, distribution / self._mass(rows).to(weights.dtype).unsqueeze(1), self.t2d)

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
        same = self.ids[:, places] == token_ids.unsqueeze(2)
        return torch.where(same, self.probs[:, places], 0.0).sum(2, dtype=torch.float64)

    def subtract(self, weights: Tensor, requests: Tensor, places: Tensor) -> None:
        ids = self.ids[requests, places]  # [M, top_m]
        probs = self.probs[requests, places].to(weights.dtype)
        known = (ids >= 0) & (ids < weights.shape[1])
        weights.scatter_add_(1, torch.where(known, ids, 0), torch.where(known, -probs, 0.0))


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


def _subtract(weights: Tensor, distribution: Tensor, t2d: Tensor | None) -> None:
    """Subtract distributions [M, Vq] over draft ids from weights [M, V] over target ids."""
    if t2d is None:
        shared = min(distribution.shape[1], weights.shape[1])
        weights[:, :shared] -= distribution[:, :shared]
    else:
        weights -= torch.where(t2d >= 0, distribution[:, t2d.clamp(min=0)], 0.0)
