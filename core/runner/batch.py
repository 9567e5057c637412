"""One step's ragged batch: prompts, single tokens and drafts alike, as tensors for one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rejection.types import DraftRows
from ..request import Request
from .addressing import Addressing, Extent
from .attention import AttentionContext
from .draft_store import DraftStore, StoredDraft
from .kv_cache import KVCache
from .transfer import upload


@dataclass(frozen=True)
class Scheduled:
    """A request's share of a step: `num_tokens` committed tokens to compute, then the drafts to verify."""

    request: Request
    start: int  # position of its first token in this step
    num_tokens: int
    num_draft_tokens: int
    samples: bool  # whether its newest token is computed, so that the next one is sampled


@dataclass(frozen=True)
class BatchItem:
    """A scheduled request with the draft taken for it."""

    scheduled: Scheduled
    draft: StoredDraft | None
    first_token: int  # where its tokens begin in the batch

    @property
    def draft_token_ids(self) -> list[int]:
        return self.draft.token_ids if self.draft else []

    @property
    def num_rows(self) -> int:
        """Tokens that it computes: committed ones and drafts."""
        return self.scheduled.num_tokens + len(self.draft_token_ids)


@dataclass(frozen=True)
class Batch:
    """Letters: B requests, N tokens, R rows whose logits are needed, K most drafts of a request."""

    items: tuple[BatchItem, ...]
    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    cache: AttentionContext
    logits_rows: Tensor  # [R] int64
    cu_rows: Tensor  # [B+1] int64, bounds of each request's logits rows
    drafts: DraftRows


def build_batch(scheduled: Sequence[Scheduled], store: DraftStore, cache: KVCache, addressing: Addressing) -> Batch:
    """Take the stored drafts of the scheduled requests and lay everything out, in the order of their KV."""
    items: list[BatchItem] = []
    token_ids: list[int] = []
    positions: list[int] = []
    extents: list[Extent] = []
    logits_rows: list[int] = []
    cu_rows = [0]
    for share in sorted(scheduled, key=lambda share: share.request.blocks[0]):
        request, start = share.request, share.start
        draft = store.take(request.row, request.generation, share.num_draft_tokens)
        item = BatchItem(share, draft, len(token_ids))
        items.append(item)
        token_ids += request.token_ids[start : start + share.num_tokens]
        token_ids += item.draft_token_ids
        positions += range(start, start + item.num_rows)
        extents.append(Extent(request.row, request.generation, request.blocks, item.first_token, start, item.num_rows))
        if share.samples:
            logits_rows += range(len(token_ids) - len(item.draft_token_ids) - 1, len(token_ids))
        cu_rows.append(len(logits_rows))
    on_device = upload([token_ids, positions, logits_rows, cu_rows], cache.device)
    return Batch(
        items=tuple(items),
        token_ids=on_device[0],
        positions=on_device[1],
        cache=addressing.of_batch(cache, extents),
        logits_rows=on_device[2],
        cu_rows=on_device[3],
        drafts=_draft_rows(items, store, cache.device),
    )


def _draft_rows(items: Sequence[BatchItem], store: DraftStore, device: torch.device) -> DraftRows:
    width = max(len(item.draft_token_ids) for item in items)
    padded = [item.draft_token_ids + [-1] * (width - len(item.draft_token_ids)) for item in items]
    lengths = [len(item.draft_token_ids) for item in items]
    flat, num_drafts = upload([[token_id for ids in padded for token_id in ids], lengths], device)
    rows = [item.scheduled.request.row for item in items]
    kinds = [item.draft.kind if item.draft else store.NO_LAW for item in items]
    return DraftRows(
        token_ids=flat.view(len(items), width),
        lengths=num_drafts,
        laws=store.laws(rows, kinds, width),
    )
