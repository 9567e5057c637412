"""Reading reported draft laws in batch: the probability of the drafted ids, and whole laws for the residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.row_law import row_law, scale_of
from .types import DraftLaws, LawKind


class LawTable(Protocol):
    """One form of draft law, over [B, K] draft positions."""

    def prob_of(self, token_ids: Tensor) -> Tensor:
        """q of token_ids [B, K] (target ids, all within the target vocabulary), float64 [B, K]."""

    def subtract(self, weights: Tensor, requests: Tensor, positions: Tensor) -> None:
        """Subtract the law of each (request, position) pair, int64 [M], from weights [M, V] in place."""


@dataclass(frozen=True)
class DenseTable:
    """Laws as weights over a draft vocabulary; q is a weight divided by its mass."""

    weights: Tensor  # [B, K, Vq]
    mass: Tensor | None  # [B, K] float64; None: 1
    t2d: Tensor | None  # [V]

    def prob_of(self, token_ids: Tensor) -> Tensor:
        draft_vocab = self.weights.shape[2]
        draft_ids = token_ids if self.t2d is None else self.t2d[token_ids]
        known = (draft_ids >= 0) & (draft_ids < draft_vocab)
        index = draft_ids.clamp(0, draft_vocab - 1).unsqueeze(2)
        probs = self.weights.gather(2, index).squeeze(2).double()
        if self.mass is not None:
            probs = probs / self.mass
        return torch.where(known, probs, 0.0)

    def subtract(self, weights: Tensor, requests: Tensor, positions: Tensor) -> None:
        law = self.weights[requests, positions].to(weights.dtype)  # [M, Vq]
        if self.mass is not None:
            law = law / self.mass[requests, positions].to(weights.dtype).unsqueeze(1)
        if self.t2d is None:
            shared = min(law.shape[1], weights.shape[1])
            weights[:, :shared] -= law[:, :shared]
        else:
            weights -= torch.where(self.t2d >= 0, law[:, self.t2d.clamp(min=0)], 0.0)


@dataclass(frozen=True)
class SparseTable:
    """Laws as a few target ids and their probabilities; every other id has probability 0."""

    ids: Tensor  # [B, K, M], -1 padded
    probs: Tensor  # [B, K, M]

    def prob_of(self, token_ids: Tensor) -> Tensor:
        return torch.where(self.ids == token_ids.unsqueeze(2), self.probs, 0.0).sum(2, dtype=torch.float64)

    def subtract(self, weights: Tensor, requests: Tensor, positions: Tensor) -> None:
        ids = self.ids[requests, positions]  # [M, top_m]
        probs = self.probs[requests, positions].to(weights.dtype)
        known = (ids >= 0) & (ids < weights.shape[1])
        weights.scatter_add_(1, torch.where(known, ids, 0), torch.where(known, -probs, 0.0))


def law_tables(laws: DraftLaws) -> dict[LawKind, LawTable]:
    """The forms of law present in this batch."""
    tables: dict[LawKind, LawTable] = {}
    if laws.probs is not None:
        tables[LawKind.DENSE_PROBS] = DenseTable(laws.probs, None, laws.t2d)
    if laws.logits is not None:
        shape, draft_vocab = laws.logits.shape[:2], laws.logits.shape[2]
        rows = laws.logits.reshape(-1, draft_vocab)
        unit = scale_of(torch.ones(1, device=rows.device)).expand(len(rows))
        law = row_law(rows, unit)
        weights = law.weights.flatten(1)[:, :draft_vocab].view(*shape, draft_vocab)
        mass = law.mass if law.bad is None else law.mass.masked_fill(law.bad.unsqueeze(1), torch.nan)
        tables[LawKind.DENSE_LOGITS] = DenseTable(weights, mass.view(shape), laws.t2d)
    if laws.sparse_ids is not None and laws.sparse_probs is not None:
        tables[LawKind.SPARSE] = SparseTable(laws.sparse_ids, laws.sparse_probs)
    return tables
