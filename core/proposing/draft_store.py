"""Drafts and their distributions between the step that proposed them and the step that verifies them.

Stored by row, gathered in whatever order the next batch has, consumed exactly once. A request that skips a step
keeps its own; one that is finished or preempted loses them. A draft is tied to the row's generation, so a row that
changed hands within a step never meets its predecessor's draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.sdk.types import DistributionKind, DraftDistribution

from ..cache.transfer import upload
from ..rejection.types import PADDING_TOKEN_ID, DraftDistributions, DraftRows
from .draft_table import CheckedDraft, DraftReport, DraftTable

if TYPE_CHECKING:
    from specdec.sdk.needs import DistributionForm


@dataclass(frozen=True)
class DistributionBuffers:
    """Row-indexed storage of draft distributions, allocated once for what the proposer declared."""

    dense: Tensor | None  # [rows, K, Vd] float32
    sparse_ids: Tensor | None  # [rows, K, M] int64
    sparse_probs: Tensor | None  # [rows, K, M] float32
    t2d: Tensor | None  # [V] int64

    @property
    def device(self) -> torch.device | None:
        """Where they lie. None: no distribution can be stored."""
        held = self.sparse_ids if self.dense is None else self.dense
        return None if held is None else held.device

    @classmethod
    def none(cls) -> DistributionBuffers:
        """No storage: every draft is one-hot."""
        return cls(None, None, None, None)

    @classmethod
    def allocate(
        cls, form: DistributionForm, shape: tuple[int, int, int], t2d: Tensor | None, device: torch.device
    ) -> DistributionBuffers:
        """Buffers of [rows, K, width] for the declared form; none at all for one-hot."""
        dense = torch.empty(shape, dtype=torch.float32, device=device) if form == "dense" else None
        sparse = form == "sparse"
        ids = torch.empty(shape, dtype=torch.int64, device=device) if sparse else None
        probs = torch.empty(shape, dtype=torch.float32, device=device) if sparse else None
        return cls(dense, ids, probs, t2d)

    def examples(self, count: int) -> list[DraftDistributions]:
        """Parts of the buffers for so many requests: one example for each kind that may be taken."""
        if self.device is None:
            return []
        kind = torch.zeros(count, dtype=torch.uint8, device=self.device)
        dense = DistributionKind.DENSE_LOGITS, DistributionKind.DENSE_PROBS
        kinds = (DistributionKind.SPARSE,) if self.dense is None else dense
        return [self.gather(slice(count), kind, {each}) for each in kinds]

    def put(self, rows: Tensor, distribution: DraftDistribution, kinds: Set[int]) -> None:
        """Keep distributions in the order of rows [B]. kinds: those that occur; other tensors are not looked at."""
        probs = distribution.probs if DistributionKind.DENSE_PROBS in kinds else None
        logits = distribution.logits if DistributionKind.DENSE_LOGITS in kinds else None
        dense = logits if probs is None else probs
        if probs is not None and logits is not None:
            is_probs = distribution.kind == DistributionKind.DENSE_PROBS
            dense = torch.where(is_probs[:, None, None], probs.float(), logits.float())
        sparse = DistributionKind.SPARSE in kinds
        for buffer, source in (
            (self.dense, dense),
            (self.sparse_ids, distribution.sparse_ids if sparse else None),
            (self.sparse_probs, distribution.sparse_probs if sparse else None),
        ):
            if buffer is not None and source is not None:
                buffer[rows, : source.shape[1]] = source.to(buffer.device, buffer.dtype)

    def gather(
        self, rows: Tensor | slice, kind: Tensor, kinds: Set[int], width: int | None = None
    ) -> DraftDistributions:
        """Gather rows [B], each of its kind [B]: tensors [B, width, ...] of the kinds that may occur.

        width: of the batch's drafts. None means all places.
        """

        def taken(buffer: Tensor | None, *wanted: DistributionKind) -> Tensor | None:
            return None if buffer is None or kinds.isdisjoint(wanted) else buffer[rows, :width]

        dense = taken(self.dense, DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS)
        return DraftDistributions(
            kind=kind.to(torch.uint8),
            draft_probs=dense if DistributionKind.DENSE_PROBS in kinds else None,
            draft_logits=dense if DistributionKind.DENSE_LOGITS in kinds else None,
            sparse_ids=taken(self.sparse_ids, DistributionKind.SPARSE),
            sparse_probs=taken(self.sparse_probs, DistributionKind.SPARSE),
            t2d=self.t2d,
        )


class StoredDraft(NamedTuple):
    """What the host keeps of one row's draft; its distribution, if any, lies in the buffers."""

    generation: int
    length: int  # tokens to plan for: all there are, or as many as were asked for where the outcome tells
    kinds: frozenset[int]  # those that its distribution may have; none: it is one-hot
    report: DraftReport | None  # None: it comes with the outcome
    replacement: bool = False  # see `DraftDistribution`


_NOTHING = StoredDraft(-1, 0, frozenset(), DraftReport(0, 0, DistributionKind.ONE_HOT, []))


@dataclass(frozen=True)
class TakenDrafts:
    """The drafts of one batch, in its order."""

    rows: Sequence[int]
    stored: Sequence[StoredDraft]
    lengths: Sequence[int]  # tokens of each that the batch has room for
    table: DraftTable | None
    buffers: DistributionBuffers
    parents: Sequence[Sequence[int]] | None = None  # of each request's nodes; None: chains

    @cached_property
    def width(self) -> int:
        """Most tokens of a request."""
        return max(self.lengths, default=0)

    @cached_property
    def token_ids(self) -> list[list[int]]:
        """The tokens that the host knows, and padding for those that `put_in` fills in."""
        pairs = zip(self.stored, self.lengths, strict=True)
        return [each.report.token_ids[:n] if each.report else [PADDING_TOKEN_ID] * n for each, n in pairs]

    def columns(self, first_places: Sequence[int]) -> list[list[int]]:
        """What has to be sent with the batch. first_places: where in the batch each draft begins."""
        width = self.width
        if self.table is None:
            padded: list[int] = []  # [B, width]
            for ids in self.token_ids:
                padded += [*ids, *[PADDING_TOKEN_ID] * (width - len(ids))]
            trees = () if self.parents is None else tree_columns(self.parents, width, self.stored)
            return [[*self.lengths], padded, *trees, *(self._stored_kinds() if self.kinds else ())]
        places: list[int] = []
        sources: list[int] = []  # among [B, width]
        for index, (first, length) in enumerate(zip(first_places, self.lengths, strict=True)):
            places += range(first, first + length)
            sources += range(index * width, index * width + length)
        return [[*self.lengths], [*self.rows], places, sources]

    def put_in(self, tokens: Tensor, sent: Sequence[Tensor]) -> tuple[DraftRows, Tensor]:
        """The drafts as verification reads them, and numbers that the host has to read: [B, 0], or [B, 3 + K].

        tokens [N]: the batch's, which drafts of a device are put into. sent: what `columns` gave.
        """
        lengths, width, columns = sent[0], self.width, iter(sent[1:])
        if self.table is None or not width:
            shape = len(lengths), width
            token_ids = next(columns)[: len(lengths) * width].view(shape)
            parents = replacement = None
            if self.parents is not None:
                parents, replacement = next(columns)[: token_ids.numel()].view(shape), next(columns)
            found = self.distributions(list(columns))
            if found is not None and replacement is not None:
                found = replace(found, replacement=replacement.bool())
            return DraftRows(token_ids, lengths, found, parents), token_ids[:, :0]
        rows, places, sources = columns
        numbers, token_ids = self.table.gather(rows, lengths, width)
        tokens.index_copy_(0, places, token_ids.view(-1)[sources].clamp_(min=0))
        return DraftRows(token_ids, lengths, self.distributions([rows, self.table.kinds(numbers)])), numbers

    def distributions(self, sent: Sequence[Tensor] = ()) -> DraftDistributions | None:
        """The distributions of the drafts, [B, width, ...]. None means that every draft is one-hot.

        sent: rows and kinds [B] of the drafts. Empty means that they are sent from here.
        """
        device = self.buffers.device
        if device is None or not self.kinds:
            return None
        rows, kind = sent or upload(self._stored_kinds(), device)
        return self.buffers.gather(rows, kind, self.kinds, self.width)

    @cached_property
    def kinds(self) -> frozenset[int]:
        """The kinds that the distributions may have."""
        return frozenset[int]().union(*(each.kinds for each in self.stored))

    def _stored_kinds(self) -> list[list[int]]:
        """Rows, and the kinds that the host knows of their drafts."""
        return [[*self.rows], [each.report.kind if each.report and each.kinds else 0 for each in self.stored]]

    def reports(self, numbers: Sequence[Sequence[int]], first: int = 0) -> list[DraftReport]:
        """Read a report per request. numbers: by request what was read of those that `put_in` gave, from `first` on."""
        pairs = zip(self.stored, numbers, strict=True)
        return [each.report or DraftReport.parse(found[first:]) for each, found in pairs]

    def verified(self, reports: Sequence[DraftReport]) -> list[list[int]]:
        """The tokens of each request that verification met."""
        return [each.token_ids[: min(each.num_usable, n)] for each, n in zip(reports, self.lengths, strict=True)]


class DraftStore:
    """Drafts by row. `num_one_hot_fallbacks` counts rows without a distribution where others reported one."""

    def __init__(
        self, buffers: DistributionBuffers, table: DraftTable | None = None, *, keeps_trees: bool = False
    ) -> None:
        """table: where drafts lie that are read with the outcome. None means that the host reads them at once.
        keeps_trees: whether drafts may have parents.
        """
        self.table = table
        self._keeps_trees = keeps_trees
        self._buffers = buffers
        self._drafts: dict[int, StoredDraft] = {}
        self.num_one_hot_fallbacks = 0

    def length(self, row: int, generation: int) -> int:
        """How many tokens are waiting for this row; 0 if the row changed hands."""
        stored = self._drafts.get(row)
        return stored.length if stored and stored.generation == generation else 0

    def put(
        self,
        rows: Sequence[int],
        generations: Sequence[int],
        draft: CheckedDraft,
        into: Tensor | None = None,
        *,
        all_greedy: bool = False,
    ) -> None:
        """Store one draft per row, replacing what was there. Its distribution is kept if there is room.

        into: the rows [B] as a tensor, where they were sent already. all_greedy: the verification of these rows reads
        no distribution.
        """
        keep = draft.distribution is not None and self._buffers.device is not None and not all_greedy
        self._put_tensors(rows, draft, into, keep=keep)
        for row, generation, length, report in zip(rows, generations, draft.lengths, draft.reports, strict=True):
            kinds = draft.kinds if keep else _NOTHING.kinds
            if keep and report:
                kinds &= {report.kind}
                self._count(report)
            if length:
                replacement = draft.distribution is not None and draft.distribution.replacement
                self._drafts[row] = StoredDraft(generation, length, kinds, report, replacement)
            else:
                self._drafts.pop(row, None)

    def _put_tensors(self, rows: Sequence[int], draft: CheckedDraft, into: Tensor | None, *, keep: bool) -> None:
        device = self._buffers.device if self.table is None else self.table.device
        if device is None or (self.table is None and not keep):
            return
        if into is None or into.device != device:
            (into,) = upload([rows], device)
        if self.table is not None and draft.numbers is not None:
            self.table.put(into, draft.numbers)
            if draft.kinds and not keep:
                self.table.forget_kinds(into)
        if keep and draft.distribution is not None:
            self._buffers.put(into, draft.distribution, draft.kinds)

    def take(self, wanted: Sequence[tuple[int, int, int]]) -> TakenDrafts:
        """Remove the drafts of a batch: nothing of a row without one of its generation.

        wanted: row, generation and most tokens of each request.
        """
        rows: list[int] = []
        stored: list[StoredDraft] = []
        lengths: list[int] = []
        for row, generation, limit in wanted:
            found = self._drafts.pop(row, _NOTHING)
            kept = found if found.generation == generation and limit else _NOTHING
            rows.append(row)
            stored.append(kept)
            lengths.append(min(kept.length, limit))
        parents = parents_of(stored, lengths) if self._keeps_trees else None
        return TakenDrafts(rows, stored, lengths, self.table, self._buffers, parents)

    def count_late(self, taken: TakenDrafts, reports: Sequence[DraftReport]) -> None:
        """Count what `put` could not, because it was read with the outcome only."""
        for stored, report in zip(taken.stored, reports, strict=True):
            if stored.report is None and stored.kinds:
                self._count(report)

    def _count(self, report: DraftReport) -> None:
        self.num_one_hot_fallbacks += report.kind == DistributionKind.ONE_HOT and report.length > 0

    def clear(self) -> None:
        """Forget every draft: the weights that it was drawn with are no longer the proposer's."""
        self._drafts.clear()


def parents_of(stored: Iterable[StoredDraft], lengths: Sequence[int]) -> list[list[int]] | None:
    """The parents of each draft's first `lengths` nodes; a chain's are those before them. None: all are chains."""
    known = [each.report.parents if each.report else None for each in stored]
    if not any(known) or not any(lengths):
        return None
    pairs = zip(known, lengths, strict=True)
    return [[*range(-1, length - 1)] if parents is None else parents[:length] for parents, length in pairs]


def tree_columns(parents: Sequence[Sequence[int]], width: int, stored: Sequence[StoredDraft]) -> list[list[int]]:
    """What has to be sent of trees: parents [B, width], padded with -1, and whether siblings were put back [B]."""
    padded = [number for each in parents for number in (*each, *[-1] * (width - len(each)))]
    return [padded, [each.replacement for each in stored]]
