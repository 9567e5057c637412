"""One step's ragged batch: prompts, single tokens and drafts alike, as tensors for one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..cache.addressing import Addressing, Extent
from ..cache.kv_cache import KVCache
from ..cache.transfer import upload
from ..model.forward_input import ForwardInput
from ..proposing.draft_store import DraftStore, StoredDraft
from ..proposing.unread_drafts import Report, UnreadDrafts
from ..rejection.types import DraftDistributions, DraftRows
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
    """A scheduled request with the draft taken for it."""

    scheduled: Scheduled
    draft: StoredDraft | None
    first_token: int  # where its tokens begin in the batch
    read: list[int] | None = None  # its draft as it was read after the pass; None: it is known, or not yet read

    @property
    def draft_token_ids(self) -> list[int]:
        if self.read is not None:
            return self.read
        return self.draft.token_ids if self.draft else []

    @property
    def num_rows(self) -> int:
        """Tokens that it computes: committed ones and drafts, as many as were planned for."""
        return self.scheduled.num_tokens + (len(self.draft.token_ids) if self.draft else 0)

    @property
    def num_logits_rows(self) -> int:
        """Those of the newest token and of every draft; none in the middle of a prompt."""
        return self.num_rows - self.scheduled.num_tokens + 1 if self.scheduled.samples else 0


@dataclass(frozen=True)
class Batch:
    """Letters: B requests, R rows whose logits are needed, K most drafts of a request."""

    items: tuple[BatchItem, ...]
    inputs: ForwardInput
    cu_rows: Tensor  # [B+1] int64, bounds of each request's logits rows
    drafts: DraftRows
    reports: Tensor | None = None  # [B, 4+K] int64 of drafts that the host has not read; None: it has them all

    def read(self, unread: UnreadDrafts, reports: Sequence[Report]) -> tuple[BatchItem, ...]:
        """The items with the tokens of drafts that the host had not read."""
        pairs = zip(self.items, reports, strict=True)
        return tuple(
            replace(item, read=unread.tokens(report, len(item.draft.token_ids))) if item.draft else item
            for item, report in pairs
        )


def build_batch(scheduled: Sequence[Scheduled], store: DraftStore, cache: KVCache, addressing: Addressing) -> Batch:
    """Take the stored drafts of the scheduled requests and lay everything out, in the order of the schedule."""
    items: list[BatchItem] = []
    token_ids: list[int] = []
    positions: list[int] = []
    extents: list[Extent] = []
    logits_rows: list[int] = []
    cu_rows = [0]
    for share in scheduled:
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
    lengths = [len(item.draft_token_ids) for item in items]
    own = [token_ids, positions, logits_rows, cu_rows, lengths]
    drafted = _padded(items, max(lengths)) if store.unread is None else _places(items, max(lengths))
    sent = upload([*own, *drafted, *addressing.columns(extents)], cache.device)
    tokens, num_drafts = sent[0], sent[4]
    place = len(own) + len(drafted)
    reports, drafts = _drafts(sent[len(own) : place], tokens, num_drafts, max(lengths), store.unread)
    return Batch(
        items=tuple(items),
        inputs=ForwardInput(tokens, sent[1], sent[2], addressing.of_batch(cache, extents, sent[place:])),
        cu_rows=sent[3],
        drafts=DraftRows(drafts, num_drafts, _distributions(items, store, max(lengths), reports)),
        reports=reports,
    )


def _padded(items: Sequence[BatchItem], width: int) -> list[list[int]]:
    """The drafts that the host knows, each padded to the width."""
    padded = [item.draft_token_ids + [-1] * (width - len(item.draft_token_ids)) for item in items]
    return [[token_id for ids in padded for token_id in ids]]


def _places(items: Sequence[BatchItem], width: int) -> list[list[int]]:
    """For drafts that lie on the device: rows; where in the batch each token goes, and from where among [B, width]."""
    places: list[int] = []
    sources: list[int] = []
    for index, item in enumerate(items):
        first, count = item.first_token + item.scheduled.num_tokens, len(item.draft_token_ids)
        places += range(first, first + count)
        sources += range(index * width, index * width + count)
    return [[item.scheduled.request.row for item in items], places, sources]


def _drafts(
    sent: Sequence[Tensor], tokens: Tensor, num_drafts: Tensor, width: int, unread: UnreadDrafts | None
) -> tuple[Tensor | None, Tensor]:
    """The reports of unread drafts, if there are any in the batch, and all drafts [B, width].

    `sent`: what `_padded` or `_places` gave. Unread ones are put among the tokens here.
    """
    if unread is None:
        return None, sent[0].view(len(num_drafts), width)
    rows, places, sources = sent
    if not width:
        return None, places.view(len(num_drafts), 0)
    reports, drafts = unread.gather(rows, num_drafts, width)
    tokens.index_copy_(0, places, drafts.view(-1)[sources].clamp_(min=0))
    return reports, drafts


def _distributions(
    items: Sequence[BatchItem], store: DraftStore, width: int, reports: Tensor | None
) -> DraftDistributions | None:
    rows = [item.scheduled.request.row for item in items]
    kinds = [item.draft.kind if item.draft else store.NO_DISTRIBUTION for item in items]
    return store.distributions(rows, kinds, width, None if reports is None else Report.distributions(reports))
