"""Drafts of a device that the host has not read: it plans for as many tokens as it asked for, and reads them later.

They lie by row until they are verified, and come to the host in the same transfer as the outcome. Where a row turns
out to hold fewer tokens, or no token at a place, verification meets NO_PROPOSAL there, which stops it as the end does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.sdk import DistributionForm, DistributionKind, Draft, DraftDistribution

from ..cache.transfer import upload
from ..rejection.types import NO_PROPOSAL
from .draft_support import can_draw


class Report(NamedTuple):
    """What was put for one row, once the host has read it."""

    length: int
    num_usable: int  # the most that can be verified: before the first token that its distribution cannot have drawn
    budget: int
    has_distribution: bool
    token_ids: list[int]  # [K], as the proposer returned them

    @staticmethod
    def distributions(reports: Tensor) -> Tensor:
        """`has_distribution` of all rows, still on the device: [B] int64."""
        return reports[:, 3]

    @classmethod
    def parse(cls, numbers: Sequence[int]) -> Report:
        """From a row of `UnreadDrafts.gather`."""
        length, num_usable, budget, has_distribution, *token_ids = numbers
        return cls(length, num_usable, budget, bool(has_distribution), token_ids)


class UnreadDrafts:
    """One row of numbers per row of the engine: the fields of a `Report`."""

    def __init__(self, num_rows: int, num_draft_tokens: int, vocab_size: int, device: torch.device) -> None:
        self._reports = torch.zeros(num_rows, 4 + num_draft_tokens, dtype=torch.int64, device=device)
        self._places = torch.arange(num_draft_tokens, device=device)
        self._vocab_size = vocab_size

    def put(
        self,
        rows: Sequence[int],
        budgets: Sequence[int],
        draft: Draft,
        tagged: TaggedDistribution | None,
        t2d: Tensor | None = None,
    ) -> None:
        """Keep a draft, in the order of `rows`; tagged None: every row is one-hot. t2d [V]: see `can_draw`."""
        into, asked = upload([rows, budgets], self._reports.device)
        lengths = num_usable = draft.lengths.long()
        has_distribution = torch.zeros_like(asked)
        if tagged is not None:
            has_distribution = tagged.has_distribution.long()
            possible = can_draw(tagged.kind, tagged.distribution, draft.token_ids, t2d, self._vocab_size)
            possible |= ~tagged.has_distribution[:, None]
            num_usable = torch.minimum(lengths, possible.cumprod(1).sum(1))
        facts = torch.stack([lengths, num_usable, asked, has_distribution], dim=1)
        self._reports.index_copy_(0, into, torch.cat([facts, draft.token_ids.long()], dim=1))

    def gather(self, rows: Tensor, limits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The reports [B, 4 + K] of `rows` [B], and their first `width` drafts, NO_PROPOSAL where there is none.

        `limits` [B]: how many tokens of each row the batch verifies. An id outside the vocabulary is no draft, nor is
        one that its distribution cannot have drawn: what is emitted there follows the target alone.
        """
        reports = self._reports.index_select(0, rows)
        token_ids = reports[:, 4 : 4 + width]
        missing = self._places[:width] >= torch.minimum(limits, reports[:, 1])[:, None]
        missing |= token_ids >= self._vocab_size
        return reports, token_ids.masked_fill(missing, NO_PROPOSAL).clamp_(min=NO_PROPOSAL)

    def tokens(self, report: Report, limit: int) -> list[int]:
        """The drafts of a row that were verified: those before the first NO_PROPOSAL of `gather`."""
        offered = report.token_ids[: max(min(report.num_usable, limit), 0)]
        return list(takewhile(lambda token_id: 0 <= token_id < self._vocab_size, offered))


class TaggedDistribution(NamedTuple):
    """A distribution that has one kind in every row that has it at all."""

    kind: DistributionKind
    distribution: DraftDistribution
    has_distribution: Tensor  # [B] bool; the other rows are one-hot


def of_one_kind(distribution: DraftDistribution, form: DistributionForm) -> TaggedDistribution | None:
    """A distribution of the declared form whose tags the host has not read; None if it brings no tensor of that form.

    A row whose tag has no tensor counts as one-hot. Where both dense kinds may occur, probabilities become logits.
    """
    kind, is_probs = distribution.kind, distribution.kind == DistributionKind.DENSE_PROBS
    if form == "sparse":
        return (
            None
            if distribution.sparse_ids is None
            else TaggedDistribution(DistributionKind.SPARSE, distribution, kind == DistributionKind.SPARSE)
        )
    if distribution.draft_logits is None:
        return (
            None
            if distribution.draft_probs is None
            else TaggedDistribution(DistributionKind.DENSE_PROBS, distribution, is_probs)
        )
    is_logits = kind == DistributionKind.DENSE_LOGITS
    if distribution.draft_probs is None:
        return TaggedDistribution(DistributionKind.DENSE_LOGITS, distribution, is_logits)
    logits = torch.where(
        is_probs[:, None, None], distribution.draft_probs.float().log(), distribution.draft_logits.float()
    )
    return TaggedDistribution(
        DistributionKind.DENSE_LOGITS,
        replace(distribution, draft_probs=None, draft_logits=logits),
        is_probs | is_logits,
    )
