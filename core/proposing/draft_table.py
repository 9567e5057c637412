"""Drafts as rows of numbers: the host reads them at once, or they wait on their device and come with the outcome.

While they wait, the host plans for as many tokens as it asked for. Where a row turns out to hold fewer tokens, or none
that can be verified, verification meets NO_PROPOSAL, which stops it as the end of a draft does.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.sdk.types import DistributionKind, Draft, DraftDistribution

from ..rejection.types import NO_PROPOSAL

if TYPE_CHECKING:
    from specdec.sdk.needs import Needs

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
        """Read a row of `measure` for drafts of `width` tokens. width: None means that the drafts are chains."""
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
        """Keep a draft that the host has read."""
        kinds = frozenset(each.kind for each in reports) - {DistributionKind.ONE_HOT}
        return cls([each.length for each in reports], reports, None, distribution, kinds)

    @property
    def token_ids(self) -> list[list[int]]:
        """The token ids of a draft that was read at once."""
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


def distribution_width(needs: Needs, vocab_size: int) -> int:
    """How many numbers a draft's distribution has in the form that is kept: entries of a sparse one, else draft ids."""
    if needs.stored_form == "sparse":
        return needs.sparse_top_m
    return vocab_size if needs.draft_vocabulary is None else len(needs.draft_vocabulary)


def target_to_draft(vocabulary: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """The draft id of each target id, -1 where it has none: [V] int64. `vocabulary` [Vd]: target ids by draft id."""
    t2d = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
    t2d[torch.tensor(vocabulary, device=device)] = torch.arange(len(vocabulary), device=device)
    return t2d


def can_draw(
    kind: int, distribution: DraftDistribution, token_ids: Tensor, t2d: Tensor | None, vocab_size: int
) -> Tensor:
    """Whether each token can come from its distribution, read as this kind in every row: [B, K] bool.

    Probabilities have to be above 0, logits finite, and every id of a sparse distribution within -1 .. V - 1.
    `t2d` is None where draft ids are target ids. Padding gives any answer. Nothing waits for a device.
    """
    match kind:
        case DistributionKind.DENSE_PROBS if distribution.probs is not None:
            return _entries(distribution.probs, token_ids, t2d) > 0
        case DistributionKind.DENSE_LOGITS if distribution.logits is not None:
            return _entries(distribution.logits, token_ids, t2d).isfinite()
        case DistributionKind.SPARSE if distribution.sparse_ids is not None and distribution.sparse_probs is not None:
            drawn = (distribution.sparse_ids == token_ids[..., None]) & (distribution.sparse_probs > 0)
            inside = (distribution.sparse_ids >= -1) & (distribution.sparse_ids < vocab_size)
            return drawn.any(-1) & inside.all(-1)
    return torch.ones_like(token_ids, dtype=torch.bool)


def _entries(table: Tensor, token_ids: Tensor, t2d: Tensor | None) -> Tensor:
    """The entries [B, K] of a table [B, K, Vd] at target ids, NaN for those outside the draft vocabulary."""
    width = table.shape[2] if t2d is None else len(t2d)
    known = token_ids.long().clamp(0, width - 1)
    if t2d is None:
        return table.gather(2, known[..., None])[..., 0]
    draft_ids = t2d[known]
    return table.gather(2, draft_ids.clamp(min=0)[..., None])[..., 0].masked_fill(draft_ids < 0, torch.nan)


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
