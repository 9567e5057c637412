"""Drafts and their distributions between the step that proposed them and the step that verifies them.

Stored by row, gathered in whatever order the next batch has, consumed exactly once. A request that skips a step
keeps its own; one that is finished or preempted loses them. A draft is tied to the row's generation, so a row that
changed hands within a step never meets its predecessor's draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sdk import DistributionForm, DistributionKind, Draft, DraftDistribution

from ..cache.transfer import upload
from ..rejection.types import DraftDistributions
from .unread_drafts import Report, UnreadDrafts, of_one_kind


@dataclass(frozen=True)
class DistributionBuffers:
    """Row-indexed storage of draft distributions, allocated once for what the proposer declared."""

    dense: Tensor | None  # [rows, K, Vd] float32
    sparse_ids: Tensor | None  # [rows, K, M] int64
    sparse_probs: Tensor | None  # [rows, K, M] float32
    t2d: Tensor | None  # [V] int64

    @property
    def keep_distributions(self) -> bool:
        """Whether any distribution can be stored."""
        return self.dense is not None or self.sparse_ids is not None

    @classmethod
    def none(cls) -> DistributionBuffers:
        """No storage: every draft is one-hot."""
        return cls(None, None, None, None)

    @classmethod
    def allocate(
        cls, form: DistributionForm, shape: tuple[int, int, int], t2d: Tensor | None, device: torch.device
    ) -> DistributionBuffers:
        """Buffers of [rows, K, width] for the declared form; none at all for one-hot."""
        dense = torch.empty(shape, device=device) if form == "dense" else None
        sparse = form == "sparse"
        ids = torch.empty(shape, dtype=torch.int64, device=device) if sparse else None
        probs = torch.empty(shape, device=device) if sparse else None
        return cls(dense, ids, probs, t2d)


@dataclass(frozen=True)
class StoredDraft:
    """One row's draft on the host; its distribution, if any, is in the buffers."""

    generation: int
    token_ids: list[int]  # zeros, as many as were asked for, while the draft is unread
    kind: DistributionKind


class DraftStore:
    """Drafts by row. `num_one_hot_fallbacks` counts rows without a distribution where others reported one."""

    NO_DISTRIBUTION = DistributionKind.ONE_HOT  # what a row without a draft counts as

    def __init__(self, buffers: DistributionBuffers, unread: UnreadDrafts | None = None) -> None:
        """`unread`: where drafts lie whose tokens stay on the device until they are verified; None: they do not."""
        self.unread = unread
        self._buffers = buffers
        self._drafts: dict[int, StoredDraft] = {}
        self.num_one_hot_fallbacks = 0

    def length(self, row: int, generation: int) -> int:
        """How many tokens are waiting for this row; 0 if the row changed hands."""
        stored = self._drafts.get(row)
        return len(stored.token_ids) if stored and stored.generation == generation else 0

    def put(
        self,
        rows: Sequence[int],
        generations: Sequence[int],
        token_ids: Sequence[list[int]],
        distribution: DraftDistribution | None,
        unread: Draft | None = None,
    ) -> None:
        """Store one draft per row, replacing what was there. `distribution` is in the order of `rows`; kept if there
        is room.

        `unread`: the draft whose tokens `token_ids` stands for with zeros.
        """
        distribution = distribution if self._buffers.keep_distributions else None
        if unread is not None:
            self._put_unread(rows, generations, token_ids, distribution, unread)
            return
        kinds = (
            [DistributionKind.ONE_HOT] * len(rows)
            if distribution is None
            else [DistributionKind(k) for k in distribution.kind.tolist()]
        )
        self._put_tokens(rows, generations, token_ids, kinds)
        if distribution is not None:
            without_distribution = [
                ids for ids, kind in zip(token_ids, kinds, strict=True) if kind is DistributionKind.ONE_HOT and ids
            ]
            self.num_one_hot_fallbacks += len(without_distribution)
            self._put_distribution(rows, distribution, kinds)

    def _put_unread(
        self,
        rows: Sequence[int],
        generations: Sequence[int],
        token_ids: Sequence[list[int]],
        distribution: DraftDistribution | None,
        draft: Draft,
    ) -> None:
        assert self.unread is not None, "asked for by whoever gave the place"
        tagged = (
            None
            if distribution is None
            else of_one_kind(distribution, "dense" if self._buffers.dense is not None else "sparse")
        )
        kinds = [tagged.kind if tagged else DistributionKind.ONE_HOT] * len(rows)
        self.unread.put(rows, list(map(len, token_ids)), draft, tagged, self._buffers.t2d)
        self._put_tokens(rows, generations, token_ids, kinds)
        if tagged:
            self._put_distribution(rows, tagged.distribution, kinds)

    def _put_tokens(
        self,
        rows: Sequence[int],
        generations: Sequence[int],
        token_ids: Sequence[list[int]],
        kinds: Sequence[DistributionKind],
    ) -> None:
        for row, generation, ids, kind in zip(rows, generations, token_ids, kinds, strict=True):
            if ids:
                self._drafts[row] = StoredDraft(generation, ids, kind)
            else:
                self._drafts.pop(row, None)

    def _put_distribution(
        self, rows: Sequence[int], distribution: DraftDistribution, kinds: Sequence[DistributionKind]
    ) -> None:
        buffers = self._buffers
        device = distribution.kind.device

        def chosen(wanted: DistributionKind) -> tuple[Tensor | slice, Tensor]:
            """Places in the distribution and rows of this kind, listed here: a device would have to be asked how
            many.
            """
            places = [place for place, kind in enumerate(kinds) if kind is wanted]
            if len(places) == len(rows):
                return slice(None), upload([rows], device)[0]
            at, into = upload([places, [rows[place] for place in places]], device)
            return at, into

        for source, kind in (
            (distribution.draft_probs, DistributionKind.DENSE_PROBS),
            (distribution.draft_logits, DistributionKind.DENSE_LOGITS),
        ):
            if kind in kinds and source is not None and buffers.dense is not None:
                at, into = chosen(kind)
                buffers.dense[into, : source.shape[1]] = source[at].float()
        if DistributionKind.SPARSE in kinds and buffers.sparse_ids is not None and buffers.sparse_probs is not None:
            assert distribution.sparse_ids is not None, "checked when it was reported"
            assert distribution.sparse_probs is not None, "checked when it was reported"
            (at, into), width = chosen(DistributionKind.SPARSE), distribution.sparse_ids.shape[1]
            buffers.sparse_ids[into, :width] = distribution.sparse_ids[at]
            buffers.sparse_probs[into, :width] = distribution.sparse_probs[at].float()

    def take(self, row: int, generation: int, limit: int) -> StoredDraft | None:
        """Remove and return a row's draft, cut to `limit` tokens; None if it has none of this generation."""
        stored = self._drafts.pop(row, None)
        if stored is None or stored.generation != generation or limit == 0:
            return None
        return StoredDraft(generation, stored.token_ids[:limit], stored.kind)

    def count_fallback(self, draft: StoredDraft, report: Report) -> None:
        """Count an unread draft that turned out to be without a distribution where others had one."""
        self.num_one_hot_fallbacks += (
            draft.kind is not DistributionKind.ONE_HOT and not report.has_distribution and report.length > 0
        )

    def distributions(
        self, rows: Sequence[int], kinds: Sequence[DistributionKind], width: int, has_distribution: Tensor | None = None
    ) -> DraftDistributions | None:
        """The distributions of taken drafts in the order of `rows`, [B, width, ...]; None if every one is one-hot.

        `has_distribution` [B]: rows of unread drafts that are not one-hot after all; None: as `kinds` says.
        """
        if all(kind is DistributionKind.ONE_HOT for kind in kinds):
            return None
        present, buffers = set(kinds), self._buffers
        device = next(t.device for t in (buffers.dense, buffers.sparse_ids) if t is not None)
        at, kind = upload([rows, kinds], device)

        def gather(source: Tensor | None, *wanted: DistributionKind) -> Tensor | None:
            return None if source is None or present.isdisjoint(wanted) else source[at, :width]

        dense_probs = gather(buffers.dense, DistributionKind.DENSE_PROBS)
        dense_logits = gather(buffers.dense, DistributionKind.DENSE_LOGITS)
        sparse_ids = gather(buffers.sparse_ids, DistributionKind.SPARSE)
        sparse_probs = gather(buffers.sparse_probs, DistributionKind.SPARSE)
        return DraftDistributions(
            kind=(kind if has_distribution is None else kind * has_distribution).to(torch.uint8),
            draft_probs=dense_probs,
            draft_logits=dense_logits,
            sparse_ids=sparse_ids,
            sparse_probs=sparse_probs,
            t2d=buffers.t2d,
        )

    def drop(self, row: int) -> None:
        """Forget a row's draft: its request finished or was preempted."""
        self._drafts.pop(row, None)
