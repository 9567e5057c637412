"""Drafts as rows of numbers: the host reads them at once, or they wait on their device and come with the outcome.

While they wait, the host plans for as many tokens as it asked for. Where a row turns out to hold fewer tokens, or none
that can be verified, verification meets NO_PROPOSAL, which stops it as the end of a draft does.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.sdk.types import DistributionKind, Draft, DraftDistribution

from ..rejection.types import NO_PROPOSAL
from .draft_support import can_draw

_KIND, _NUM_FACTS = 2, 3


class DraftReport(NamedTuple):
    """What the host has read of one request's draft."""

    length: int  # as the proposer said
    num_usable: int  # tokens before the first that cannot be verified
    kind: int  # DistributionKind
    token_ids: list[int]  # [K], as the proposer returned them
    parents: list[int] | None = None  # [K], of a tree's nodes. None: a chain

    @classmethod
    def parse(cls, numbers: Sequence[int], width: int | None = None) -> DraftReport:
        """From a row of `measure` for drafts of so many tokens. None: for chains."""
        length, num_usable, kind, *token_ids = numbers
        return cls(length, num_usable, kind, token_ids[:width], parents=token_ids[width:] or None if width else None)


@dataclass(frozen=True)
class CheckedDraft:
    """A draft that can be stored, one row per request of the step."""

    lengths: Sequence[int]  # tokens to plan for: all there are, or the budgets where the outcome tells
    reports: Sequence[DraftReport | None]  # None: it comes with the outcome
    numbers: Tensor | None  # [B, 3 + K] int64 of `measure`, until then; None: the host has read them
    distribution: DraftDistribution | None
    kinds: frozenset[int]  # those that its rows may have, besides one-hot

    @classmethod
    def read(cls, reports: Sequence[DraftReport], distribution: DraftDistribution | None) -> CheckedDraft:
        """One that the host has read."""
        kinds = frozenset(each.kind for each in reports) - {DistributionKind.ONE_HOT}
        return cls([each.length for each in reports], reports, None, distribution, kinds)

    @property
    def token_ids(self) -> list[list[int]]:
        """Of a draft that was read at once."""
        return [each.token_ids[: each.length] for each in self.reports if each]


def measure(draft: Draft, kinds: Set[int], t2d: Tensor | None, vocab_size: int) -> Tensor:
    """The numbers of each request's report: [B, 3 + K] int64, with parents [B, 3 + 2K]. Nothing waits for a device.

    kinds: those that its rows may have; a row with another tag counts as one-hot. t2d [V]: see `can_draw`. A token is
    usable if it lies within the draft's length and the vocabulary, and its distribution can have drawn it.
    """
    lengths, token_ids = draft.lengths.long(), draft.token_ids.long()
    usable = torch.arange(token_ids.shape[1], device=token_ids.device) < lengths[:, None]
    usable &= (token_ids >= 0) & (token_ids < vocab_size)
    counted = torch.zeros_like(lengths)
    for kind in kinds:
        assert draft.distribution is not None, "its kinds were read of it"
        tagged = draft.distribution.kind == kind
        usable &= ~tagged[:, None] | can_draw(kind, draft.distribution, token_ids, t2d, vocab_size)
        counted += kind * tagged
    facts = torch.stack([lengths, usable.cumprod(1).sum(1), counted], dim=1)
    return torch.cat([facts, token_ids, *([] if draft.parents is None else [draft.parents])], dim=1)


class DraftTable:
    """The numbers of drafts by row of the engine, on a device."""

    def __init__(self, num_rows: int, num_draft_tokens: int, device: torch.device) -> None:
        self._numbers = torch.zeros(num_rows, _NUM_FACTS + num_draft_tokens, dtype=torch.int64, device=device)
        self._places = torch.arange(num_draft_tokens, device=device)

    @property
    def device(self) -> torch.device:
        return self._numbers.device

    def put(self, rows: Tensor, numbers: Tensor) -> None:
        """Keep numbers of `measure` for rows [B]."""
        self._numbers.index_copy_(0, rows, numbers)

    def forget_kinds(self, rows: Tensor) -> None:
        """Rows [B] whose distributions are not kept count as one-hot."""
        self._numbers[:, _KIND].index_fill_(0, rows, 0)

    def gather(self, rows: Tensor, limits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The numbers [B, 3 + K] of rows [B], and their first `width` tokens, NO_PROPOSAL where none is usable.

        limits [B]: how many tokens of each row the batch verifies.
        """
        numbers = self._numbers.index_select(0, rows)
        missing = self._places[:width] >= torch.minimum(limits, numbers[:, 1])[:, None]
        return numbers, numbers[:, _NUM_FACTS : _NUM_FACTS + width].masked_fill(missing, NO_PROPOSAL)

    @staticmethod
    def kinds(numbers: Tensor) -> Tensor:
        """The kind of each row's distribution: [B] int64."""
        return numbers[:, _KIND]
