"""Slots of the cache for a request's positions: where a pass finds its keys and puts its new ones.

`Addressing` reads the scheduler's lists: on a CPU a request's keys are then a view. A device has a form of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.trees import path_to

from ..kernels.attention import Span, SpanBatch, attend_by_span
from ..kernels.attention_spec import AttentionContext, AttentionSpec, Mode, StoredAttention, TreeAttention, TreeRows
from ..kernels.backend import Backend
from ..request.request import Request, Scheduled
from .kv_cache import KVCache
from .row_table import RowTable

Trees = Sequence[Sequence[int]]
"""The parents of each request's nodes."""


@dataclass(frozen=True)
class CacheView:
    """The cache as a batch sees it whose slots the host knows."""

    cache: KVCache
    batch: SpanBatch
    backend: Backend

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Store this layer's new keys and values, then attend: [N, Hq, D], [N, Hkv, D], [N, Hkv, Dv] -> [N, Hq, Dv]."""
        stored_keys, stored_values = self.cache.keys[layer], self.cache.values[layer]
        return self.backend.attend(query, keys, values, stored_keys, stored_values, self.batch, spec)

    def attend_stored(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        return attend_by_span(query, self.cache.keys[layer], self.cache.values[layer], self.batch.rows, spec)


@dataclass(frozen=True)
class TreeView(CacheView):
    """The same where the last positions of each request are nodes of a tree."""

    shares: Sequence[Scheduled]
    parents: Trees
    addressing: Addressing

    def move_paths(self, places: Tensor) -> None:
        """Move the accepted paths. The first nodes of a tree that form a chain lie right already."""
        sources: list[int] = []
        destinations: list[int] = []
        for share, parents, path in zip(self.shares, self.parents, places.tolist(), strict=True):
            first, blocks = share.start + share.num_rows - len(parents), share.request.blocks  # position of node 0
            moved = [(place - 1, depth) for depth, place in enumerate(path[1:]) if place > depth + 1]
            sources += [self.addressing.slot(blocks, first + node) for node, _ in moved]
            destinations += [self.addressing.slot(blocks, first + depth) for _, depth in moved]
        if sources:
            self.cache.move(torch.tensor(sources), torch.tensor(destinations))


class Addressing:
    """Shared by the caches that lie on the same blocks."""

    num_pad_blocks = 0  # that a cache has beyond those of the pool
    table: Any = None  # a device's blocks by row, which captured work reads; None: the host's lists address

    def __init__(self, rows: RowTable, backend: Backend) -> None:
        self._rows = rows
        self._backend = backend
        self.block_size = rows.pool.block_size

    def columns(self, shares: Sequence[Scheduled]) -> list[list[int]]:
        """The lists that `of_batch` reads on the device: they travel with the batch's own."""
        return []

    def of_batch(self, cache: KVCache, shares: Sequence[Scheduled], columns: Sequence[Tensor]) -> AttentionContext:
        """A cache as a batch sees it, in the order of its queries. `columns`: those of the same shares."""
        return self._view(cache, shares, "causal")

    def of_trees(
        self, cache: KVCache, shares: Sequence[Scheduled], columns: Sequence[Tensor], trees: TreeRows, parents: Trees
    ) -> TreeAttention:
        """A batch whose last positions in each share are nodes. The host knows the same `parents` as the device."""
        return self._tree_view(cache, shares, parents)

    def _tree_view(self, cache: KVCache, shares: Sequence[Scheduled], parents: Trees) -> TreeView:
        """A node is a span of one query whose keys are those of its path, as in plain decoding."""
        spans = [
            span
            for share, each in zip(shares, parents, strict=True)
            for span in self._tree_spans(share, each, cache.device)
        ]
        return TreeView(cache, SpanBatch(spans), self._backend, shares, parents, self)

    def _tree_spans(self, share: Scheduled, parents: Sequence[int], device: torch.device) -> list[Span]:
        stop = share.start + share.num_rows
        root = stop - len(parents)  # where the tree begins
        blocks, num_before = share.request.blocks, max(root - share.start, 0)
        spans = [self._span(blocks, share.first_token, num_before, root, device, "causal")] if num_before else []
        if not parents:
            return spans
        before = self._span(blocks, 0, 0, root, device, "causal").slots
        if isinstance(before, slice):
            before = torch.arange(before.start, before.stop, device=device)
        slots = torch.tensor([self.slot(blocks, position) for position in range(root, stop)], device=device)
        for query in range(num_before, share.num_rows):
            path = path_to(share.start + query - root, parents)
            first, num_keys = share.first_token + query, root + len(path)
            if path == list(range(len(path))):
                spans.append(self._span(blocks, first, 1, num_keys, device, "causal"))
            else:
                spans.append(Span(first, 1, num_keys, torch.cat([before, slots[path]]), device))
        return spans

    def of_rows(
        self,
        cache: KVCache,
        rows: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        mode: Mode,
        parents: Tensor | None = None,
    ) -> StoredAttention:
        """A cache as a pass sees it over the positions from `starts` [B] on of the requests in `rows` [B].

        Request b's queries are `cu_queries[b] : cu_queries[b+1]` [B+1]. `parents` [B, n]: its last n positions are
        nodes, of which the first may have been computed before. None: its positions follow each other.
        """
        requests, bounds = self._requests(), cu_queries.tolist()
        shares = [
            Scheduled(requests[row], start, stop - first, 0, samples=False, first_token=first)
            for row, start, first, stop in zip(rows.tolist(), starts.tolist(), bounds, bounds[1:], strict=False)
        ]
        if parents is None:
            return self._view(cache, shares, mode)
        return self._tree_view(cache, shares, parents.tolist())

    def _view(self, cache: KVCache, shares: Sequence[Scheduled], mode: Mode) -> CacheView:
        spans = []
        for share in shares:
            blocks, stop = share.request.blocks, share.start + share.num_rows
            spans.append(self._span(blocks, share.first_token, share.num_rows, stop, cache.device, mode))
        return CacheView(cache, SpanBatch(spans), self._backend)

    def _span(
        self, blocks: Sequence[int], start: int, num_queries: int, num_keys: int, device: torch.device, mode: Mode
    ) -> Span:
        """A request's share of a batch whose first query is the batch's `start`-th."""
        used = self._num_used(blocks, num_keys)
        if blocks[:used] == list(range(blocks[0], blocks[0] + used)):
            first = blocks[0] * self.block_size
            return Span(start, num_queries, num_keys, slice(first, first + num_keys), device, mode)
        firsts = torch.tensor(blocks[:used], device=device)[:, None] * self.block_size
        slots = (firsts + torch.arange(self.block_size, device=device)).view(-1)[:num_keys]
        return Span(start, num_queries, num_keys, slots, device, mode)

    def slot(self, blocks: Sequence[int], position: int) -> int:
        """The slot of a position of a request with these blocks."""
        return blocks[self._num_used(blocks, position + 1) - 1] * self.block_size + position % self.block_size

    def _num_used(self, blocks: Sequence[int], num_keys: int) -> int:
        """How many of the blocks hold so many keys. Raises IndexError where the request has fewer."""
        if num_keys > (has := len(blocks) * self.block_size):
            raise IndexError(f"position {num_keys - 1} is past the {has} of its request: declare a longer lookahead")
        return -(-num_keys // self.block_size)

    def num_computed(self, rows: Tensor) -> Tensor:
        """Positions of each row that the target has computed, [N] int64, where the host knows them: without a table."""
        requests = self._requests()
        return torch.tensor([requests[row].num_computed_tokens for row in rows.tolist()], dtype=torch.int64)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots [N] int64 of the tokens at (rows [N], positions [N])."""
        requests, places = self._requests(), zip(rows.tolist(), positions.tolist(), strict=True)
        slots = [self.slot(requests[row].blocks, position) for row, position in places]
        return torch.tensor(slots, dtype=torch.int64, device=rows.device)

    def slots_of_row(self, cache: KVCache, row: int, length: int) -> slice | Tensor:
        """Slots of a row's first positions; a slice where blocks are adjacent and the host knows it."""
        return self._span(self._requests()[row].blocks, 0, length, length, cache.device, "causal").slots

    def _requests(self) -> Mapping[int, Request]:
        return {request.row: request for request in self._rows.running} or defaultdict(self._vacant)

    def _vacant(self) -> Request:
        """A proposer may warm up on the whole cache, which no request owns."""
        return Request.stand_in(0, 0, 0, list(range(self._rows.pool.num_blocks)))
