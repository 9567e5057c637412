"""One step's ragged batch: prompts, single tokens and drafts alike, as tensors for one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..cache.addressing import Addressing, Extent
from ..cache.kv_cache import KVCache
from ..cache.state_store import StateShare
from ..cache.transfer import upload
from ..model.forward_input import ForwardInput
from ..proposing.draft_store import DraftStore, TakenDrafts
from ..rejection.types import DraftRows
from ..request.request import Request


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
    """A scheduled request in the batch."""

    scheduled: Scheduled
    first_token: int  # where its tokens begin in the batch
    num_drafts: int  # planned: those that there are may be fewer

    @property
    def num_rows(self) -> int:
        """Tokens that it computes: committed ones and drafts."""
        return self.scheduled.num_tokens + self.num_drafts

    @property
    def num_logits_rows(self) -> int:
        """Those of the newest token and of every draft; none in the middle of a prompt."""
        return self.num_drafts + 1 if self.scheduled.samples else 0


@dataclass(frozen=True)
class Batch:
    """Letters: B requests, R rows whose logits are needed, K most drafts of a request."""

    items: tuple[BatchItem, ...]
    inputs: ForwardInput
    cu_rows: Tensor  # [B+1] int64, bounds of each request's logits rows
    taken: TakenDrafts  # what the host plans for
    drafts: DraftRows
    numbers: Tensor  # [B, 0], or [B, 3+K] int64 that the host reads with the outcome; see `TakenDrafts.reports`


def take_drafts(scheduled: Sequence[Scheduled], store: DraftStore) -> TakenDrafts:
    """The stored drafts of the scheduled requests."""
    return store.take(
        [share.request.row for share in scheduled],
        [share.request.generation for share in scheduled],
        [share.num_draft_tokens for share in scheduled],
    )


def build_batch(scheduled: Sequence[Scheduled], store: DraftStore, cache: KVCache, addressing: Addressing) -> Batch:
    """Take the stored drafts of the scheduled requests and lay everything out, in the order of the schedule."""
    taken = take_drafts(scheduled, store)
    items: list[BatchItem] = []
    token_ids: list[int] = []
    positions: list[int] = []
    extents: list[Extent] = []
    logits_rows: list[int] = []
    cu_rows = [0]
    for share, drafts in zip(scheduled, taken.token_ids, strict=True):
        request, start = share.request, share.start
        item = BatchItem(share, len(token_ids), len(drafts))
        items.append(item)
        token_ids += request.token_ids[start : start + share.num_tokens]
        token_ids += drafts
        positions += range(start, start + item.num_rows)
        extents.append(Extent(request.row, request.generation, request.blocks, item.first_token, start, item.num_rows))
        if share.samples:
            logits_rows += range(len(token_ids) - len(drafts) - 1, len(token_ids))
        cu_rows.append(len(logits_rows))
    own = [token_ids, positions, logits_rows, cu_rows]
    drafted = taken.columns([item.first_token + item.scheduled.num_tokens for item in items])
    sent = upload([*own, *drafted, *addressing.columns(extents)], cache.device)
    place = len(own) + len(drafted)
    rows, numbers = taken.put_in(sent[0], sent[len(own) : place])
    return Batch(
        items=tuple(items),
        inputs=ForwardInput(
            sent[0],
            sent[1],
            sent[2],
            addressing.of_batch(cache, extents, sent[place:]),
            cache.states.plan([_state_share(item) for item in items]) if cache.states else None,
        ),
        cu_rows=sent[3],
        taken=taken,
        drafts=rows,
        numbers=numbers,
    )


def _state_share(item: BatchItem) -> StateShare:
    share, request = item.scheduled, item.scheduled.request
    return StateShare(
        request.row, request.generation, share.start, item.first_token, share.num_tokens, item.num_drafts
    )  # fmt: skip
