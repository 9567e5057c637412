"""The ragged batch of a step: prompts, single tokens and drafts alike, and their sampling parameters, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from specdec.sdk.trees import depths

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from ..cache.transfer import upload
from ..kernels.attention_spec import TreeAttention, TreeRows
from ..model.target import ForwardInput
from ..proposing.draft_store import DraftStore, TakenDrafts
from ..rejection.types import DraftRows, SamplingRows
from ..request.request import Request, Scheduled
from ..request.verified_tree import VerifiedTree


@dataclass(frozen=True)
class Batch:
    """Letters: B requests, R rows whose logits are needed, K most drafts of a request."""

    shares: tuple[Scheduled, ...]  # of these drafts
    inputs: ForwardInput
    trees: TreeAttention | None  # the cache of `inputs`, where drafts have parents
    cu_rows: Tensor  # [B+1] int64, bounds of each request's logits rows
    taken: TakenDrafts  # what the host plans for
    drafts: DraftRows
    numbers: Tensor  # [B, 0], or [B, 3+K] int64 that the host reads with the outcome; see `TakenDrafts.reports`
    sampling: SamplingRows

    def drafted(self) -> tuple[list[list[int]], Sequence[Sequence[int]] | None]:
        """The drafts and parents of each request. Where drafts lie on a device, the host waits for them."""
        token_ids = self.taken.token_ids
        if self.numbers.shape[1]:
            on_host = zip(self.drafts.token_ids.tolist(), self.taken.lengths, strict=True)
            token_ids = [ids[:length] for ids, length in on_host]
        return token_ids, self.taken.parents


def build_batch(
    shares: Sequence[Scheduled], store: DraftStore, cache: KVCache, addressing: Addressing, table: SamplingTable
) -> Batch:
    """Take the stored drafts of the scheduled requests and lay everything out, in the order of the schedule.

    All that a step needs on its device is sent here, in one transfer.
    """
    requests = [share.request for share in shares]
    taken = store.take([(share.request.row, share.request.generation, share.num_draft_tokens) for share in shares])
    token_ids: list[int] = []
    positions: list[int] = []
    logits_rows: list[int] = []
    cu_rows = [0]
    for (request, start, num_tokens, num_drafts, samples, _), drafts in zip(shares, taken.token_ids, strict=True):
        stop = start + num_tokens
        token_ids += request.token_ids[start:stop]
        token_ids += drafts
        positions += range(start, stop + num_drafts)
        if samples:
            logits_rows += range(len(token_ids) - num_drafts - 1, len(token_ids))
        cu_rows.append(len(logits_rows))
    if taken.parents is not None:
        for share, parents in zip(shares, taken.parents, strict=True):
            for place, depth in enumerate(depths(parents), start=share.first_draft):
                positions[place] = positions[share.first_draft - 1] + depth  # siblings share one
    parameters, floats = table.columns(requests)
    drafted = taken.columns([share.first_draft for share in shares])
    lists = [token_ids, positions, logits_rows, cu_rows, *parameters, *drafted]
    first_draft, first_address = len(lists) - len(drafted), len(lists)
    lists += addressing.columns(shares)
    sent = upload(lists, cache.device, floats)
    rows, numbers = taken.put_in(sent[0], sent[first_draft:first_address])
    addressed, trees = sent[first_address : len(lists)], None
    if taken.parents is not None and rows.parents is not None:
        tree_rows = TreeRows(rows.parents, rows.lengths)
        trees = addressing.of_trees(cache, shares, addressed, tree_rows, taken.parents)
    return Batch(
        shares=tuple(shares),
        inputs=ForwardInput(
            sent[0],
            sent[1],
            sent[2],
            trees or addressing.of_batch(cache, shares, addressed),
            cache.states.plan(shares) if cache.states else None,
        ),
        trees=trees,
        cu_rows=sent[3],
        taken=taken,
        drafts=rows,
        numbers=numbers,
        sampling=table.rows(requests, sent[4:first_draft], sent[len(lists) :]),
    )


def accepted_paths(batch: Batch, path: Sequence[Sequence[int]]) -> list[VerifiedTree]:
    """The accepted path of each request; path: [B, K + 1] of a verdict."""
    assert batch.taken.parents is not None, "trees were verified"
    nodes = [[place - 1 for place in places if place > 0] for places in path]
    return [VerifiedTree(*each) for each in zip(nodes, batch.taken.parents, strict=True)]


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
