"""One step's ragged batch: prompts, single tokens and drafts alike, and their sampling parameters, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specdec.sdk.trees import depths

from ..cache.addressing import Addressing, Extent
from ..cache.kv_cache import KVCache
from ..cache.state_store import StateShare
from ..cache.transfer import upload
from ..kernels.attention_spec import TreeAttention, TreeRows
from ..model.forward_input import ForwardInput
from ..proposing.draft_store import DraftStore, TakenDrafts
from ..rejection.types import DraftRows, SamplingRows
from ..request.request import Request
from ..request.verified_tree import VerifiedTree


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
    trees: TreeAttention | None  # the cache of `inputs`, where drafts have parents
    cu_rows: Tensor  # [B+1] int64, bounds of each request's logits rows
    taken: TakenDrafts  # what the host plans for
    drafts: DraftRows
    numbers: Tensor  # [B, 0], or [B, 3+K] int64 that the host reads with the outcome; see `TakenDrafts.reports`
    sampling: SamplingRows


def build_batch(
    scheduled: Sequence[Scheduled], store: DraftStore, cache: KVCache, addressing: Addressing, table: SamplingTable
) -> Batch:
    """Take the stored drafts of the scheduled requests and lay everything out, in the order of the schedule.

    All that a step needs on its device is sent here, in one transfer.
    """
    taken = store.take([(share.request.row, share.request.generation, share.num_draft_tokens) for share in scheduled])
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
        num_rows = item.num_rows
        positions += range(start, start + num_rows)
        extents.append(Extent(request.row, request.generation, request.blocks, item.first_token, start, num_rows))
        if share.samples:
            logits_rows += range(len(token_ids) - len(drafts) - 1, len(token_ids))
        cu_rows.append(len(logits_rows))
    if taken.parents is not None:
        for item, parents in zip(items, taken.parents, strict=True):
            put_by_depth(positions, item.first_token + item.scheduled.num_tokens, parents)
    requests = [share.request for share in scheduled]
    parameters, floats = table.columns(requests)
    drafted = taken.columns([item.first_token + item.scheduled.num_tokens for item in items])
    lists = [token_ids, positions, logits_rows, cu_rows, *parameters, *drafted]
    first_draft, first_address = len(lists) - len(drafted), len(lists)
    lists += addressing.columns(extents)
    sent = upload(lists, cache.device, floats)
    rows, numbers = taken.put_in(sent[0], sent[first_draft:first_address])
    addressed, trees = sent[first_address : len(lists)], None
    if taken.parents is not None and rows.parents is not None:
        tree_rows = TreeRows(rows.parents, rows.lengths)
        trees = addressing.of_trees(cache, extents, addressed, tree_rows, taken.parents)
    return Batch(
        items=tuple(items),
        inputs=ForwardInput(
            sent[0],
            sent[1],
            sent[2],
            trees or addressing.of_batch(cache, extents, addressed),
            cache.states.plan([_state_share(item) for item in items]) if cache.states else None,
        ),
        trees=trees,
        cu_rows=sent[3],
        taken=taken,
        drafts=rows,
        numbers=numbers,
        sampling=table.rows(requests, sent[4:first_draft], sent[len(lists) :]),
    )


def accepted_paths(batch: Batch, path: Sequence[Sequence[int]]) -> list[VerifiedTree]:
    """Of each request; path [B, K + 1] of a verdict."""
    assert batch.taken.parents is not None, "trees were verified"
    nodes = [[place - 1 for place in places if place > 0] for places in path]
    return [VerifiedTree(*each) for each in zip(nodes, batch.taken.parents, strict=True)]


def put_by_depth(positions: list[int], first: int, parents: Sequence[int]) -> None:
    """Give the nodes of a tree, which lie in a batch from `first` on, the positions of their depth."""
    for node, depth in enumerate(depths(parents)):
        positions[first + node] = positions[first - 1] + depth


def _state_share(item: BatchItem) -> StateShare:
    share, request = item.scheduled, item.scheduled.request
    return StateShare(
        request.row, request.generation, share.start, item.first_token, share.num_tokens, item.num_drafts
    )  # fmt: skip


class SamplingTable:
    """The parameters of the requests that run, sent anew only when other requests do; positions in every step."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int]] = []  # row and generation of each request
        self._rows: SamplingRows | None = None  # None: they are sent with the next batch

    def columns(self, requests: Sequence[Request]) -> tuple[list[list[int]], list[list[float]]]:
        """What has to be sent of these requests: integers, and floats."""
        position = [len(request.token_ids) for request in requests]
        running = [(request.row, request.generation) for request in requests]
        if self._rows is not None and running == self._known:
            return [position], []
        self._known, self._rows = running, None
        params = [request.params for request in requests]
        integers = [position, [p.top_k for p in params], [request.seed for request in requests]]
        return integers, [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]

    def rows(self, requests: Sequence[Request], integers: Sequence[Tensor], floats: Sequence[Tensor]) -> SamplingRows:
        """The parameters of each request, from its columns; position is that of the first token it may emit now."""
        if self._rows is not None:
            return replace(self._rows, position=integers[0])
        params = [request.params for request in requests]
        self._rows = SamplingRows(
            temperature=floats[0],
            top_k=integers[1],
            top_p=floats[1],
            min_p=floats[2],
            seed=integers[2],
            position=integers[0],
            all_greedy=all(p.greedy for p in params),
            any_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        )
        return self._rows
