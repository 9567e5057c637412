"""The ratio test and the residual draw of standard rejection, for drafts that come with their law.

Fast inference from transformers via speculative decoding, arXiv 2211.17192.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.pick import cumulate, pick, rows_where
from ..kernels.row_law import RowLaw, rows_in_cache
from .draft_law import LawTable, law_tables
from .layout import Layout
from .types import NO_PROPOSAL, STATUS_EMPTY_RESIDUAL, Coins, DraftLaws, DraftRows, LawKind


@dataclass(frozen=True)
class RatioTest:
    """The outcome of the test at every draft; it holds for the requests it applies to."""

    tables: dict[LawKind, LawTable]
    kind: Tensor  # [B, 1]
    applies: Tensor  # [B, 1] bool, a law is reported and the request is not greedy
    accept: Tensor  # [B, K] bool
    prob: Tensor  # [B, K] float64, min(1, p/q)


def ratio_test(
    target_prob: Tensor,
    vocab_size: int,
    drafts: DraftRows,
    laws: DraftLaws,
    greedy: Tensor | None,
    coins: Coins,
) -> RatioTest:
    """Accept where p > 0 and (p >= q or u * q < p): no division, no logarithm, and p == q accepts for every u.

    target_prob [B, K] is p of each draft, 0 for an id outside the vocabulary; greedy [B] marks requests that use
    no law. A row tagged with a form of which no tensor is given is verified as one-hot: lossless for any draft.
    """
    assert coins.accept is not None, "rows with a reported law need accept coins"
    tables = law_tables(laws)
    token_ids = drafts.token_ids.clamp(0, vocab_size - 1)
    draft_prob = torch.zeros_like(target_prob)
    kinds = laws.kind.unsqueeze(1)
    applies = torch.zeros_like(kinds, dtype=torch.bool)
    for kind, table in tables.items():
        of_kind = kinds == kind
        applies |= of_kind
        draft_prob = torch.where(of_kind, table.prob_of(token_ids), draft_prob)
    if greedy is not None:
        applies &= ~greedy.unsqueeze(1)
    possible = target_prob > 0
    likelier = (target_prob >= draft_prob) | (coins.accept * draft_prob < target_prob)
    return RatioTest(
        tables=tables,
        kind=kinds,
        applies=applies,
        accept=likelier & possible,
        prob=torch.where(possible, (target_prob / draft_prob).clamp_(max=1.0), 0.0),
    )


@dataclass(frozen=True)
class Recovered:
    """Tokens drawn from the residual law of one form, at the stop of the requests that need it."""

    requests: Tensor  # [M] int64
    token_ids: Tensor  # [M] int64
    wanted: Tensor  # [M] bool, the request rejected a draft of this form
    empty: Tensor  # [M] bool, its residual has no mass


def recover(
    test: RatioTest, law: RowLaw, drafts: DraftRows, coins: Coins, layout: Layout, num_accepted: Tensor
) -> list[Recovered]:
    """Draw from (p - q)+ for every request that the test stopped at a draft; one entry per form of law."""
    drawn = pad(layout.has_draft & (drafts.token_ids != NO_PROPOSAL), (0, 1))  # [B, K + 1]
    stop = num_accepted.unsqueeze(1)
    rejected = (test.applies & drawn.gather(1, stop)).squeeze(1)
    rows = layout.rows.gather(1, stop).squeeze(1)
    if law.bad is not None:
        rejected &= ~law.bad[rows]
    uniforms = coins.output.gather(1, stop).squeeze(1)
    recovered = []
    for kind, table in test.tables.items():
        wanted = rejected & (test.kind.squeeze(1) == kind)
        chosen = rows_where(wanted)
        for requests in torch.split(chosen, rows_in_cache(law.vocab_size, chosen)) if chosen.numel() else ():
            residual = law.probs(rows[requests])
            places = num_accepted[requests].clamp(max=drafts.token_ids.shape[1] - 1)
            table.subtract(residual.flatten(1)[:, : law.vocab_size], requests, places)
            cdf = cumulate(residual.clamp_(min=0.0))
            token_ids = pick(residual, cdf, uniforms[requests]).clamp_(max=law.vocab_size - 1)
            recovered.append(Recovered(requests, token_ids, wanted[requests], ~(cdf[:, -1] > 0)))
    return recovered


def with_recovered(tokens: Tensor, status: Tensor, num_accepted: Tensor, recovered: list[Recovered]) -> None:
    """Write recovered tokens into tokens [B, K + 1] at the stops; an empty residual keeps the draw from p."""
    for part in recovered:
        stops = num_accepted[part.requests]
        current = tokens[part.requests, stops]
        tokens[part.requests, stops] = torch.where(part.wanted & ~part.empty, part.token_ids, current)
        status[part.requests] |= (part.wanted & part.empty) * STATUS_EMPTY_RESIDUAL
