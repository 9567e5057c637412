"""Slots by the scheduler's lists of blocks: for a CPU, where a request's keys are then a view."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sdk.trees import path_to

from ..kernels.attention import Span, SpanBatch, attend_by_span
from ..kernels.attention_spec import AttentionSpec, Mode, TreeRows
from ..kernels.backend import Backend
from ..request.request import Request
from .addressing import Extent, Rows, Trees
from .kv_cache import KVCache


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
        """See `StoredAttention`."""
        return attend_by_span(query, self.cache.keys[layer], self.cache.values[layer], self.batch.rows, spec)


@dataclass(frozen=True)
class TreeView(CacheView):
    """The same where the last positions of each request are nodes of a tree."""

    extents: Sequence[Extent]
    parents: Trees
    addressing: HostAddressing

    def move_paths(self, places: Tensor) -> None:
        """See `TreeAttention`. The first nodes of a tree that are a chain lie right already."""
        sources: list[int] = []
        destinations: list[int] = []
        for extent, parents, path in zip(self.extents, self.parents, places.tolist(), strict=True):
            first = extent.start + extent.num_queries - len(parents)  # position of node 0
            moved = [(place - 1, depth) for depth, place in enumerate(path[1:]) if place > depth + 1]
            sources += [self.addressing.slot(extent.blocks, first + node) for node, _ in moved]
            destinations += [self.addressing.slot(extent.blocks, first + depth) for _, depth in moved]
        if sources:
            self.cache.move(torch.tensor(sources), torch.tensor(destinations))


@dataclass(frozen=True)
class _Vacant:
    """What stands in a row while no request runs: a proposer may warm up on the whole cache, which no request owns."""

    blocks: Sequence[int]
    generation: int = 0
    num_computed_tokens: int = 0


class HostAddressing:
    """See `Addressing`, of which this is the form without a block table."""

    num_pad_blocks = 0
    table = None

    def __init__(self, scheduler: Rows, backend: Backend) -> None:
        self._scheduler = scheduler
        self._backend = backend
        self.block_size = scheduler.pool.block_size

    def columns(self, extents: Sequence[Extent]) -> list[list[int]]:
        """See `Addressing`. None: the host reads its lists where they are."""
        return []

    def of_batch(self, cache: KVCache, extents: Sequence[Extent], columns: Sequence[Tensor]) -> CacheView:
        """See `Addressing`."""
        return self._view(cache, extents, "causal")

    def of_trees(
        self, cache: KVCache, extents: Sequence[Extent], columns: Sequence[Tensor], trees: TreeRows, parents: Trees
    ) -> TreeView:
        """See `Addressing`."""
        return self._tree_view(cache, extents, parents)

    def _tree_view(self, cache: KVCache, extents: Sequence[Extent], parents: Trees) -> TreeView:
        """A node is a span of one query whose keys are those of its path, as in plain decoding."""
        spans = [
            span
            for extent, each in zip(extents, parents, strict=True)
            for span in self._tree_spans(extent, each, cache.device)
        ]
        return TreeView(cache, SpanBatch(spans), self._backend, extents, parents, self)

    def _tree_spans(self, extent: Extent, parents: Sequence[int], device: torch.device) -> list[Span]:
        stop = extent.start + extent.num_queries
        root = stop - len(parents)  # where the tree begins
        blocks, num_before = extent.blocks, max(root - extent.start, 0)
        spans = [self._span(blocks, extent.first_query, num_before, root, device, "causal")] if num_before else []
        if not parents:
            return spans
        before = self._span(blocks, 0, 0, root, device, "causal").slots
        if isinstance(before, slice):
            before = torch.arange(before.start, before.stop, device=device)
        slots = torch.tensor([self.slot(blocks, position) for position in range(root, stop)], device=device)
        for query in range(num_before, extent.num_queries):
            path = path_to(extent.start + query - root, parents)
            first, num_keys = extent.first_query + query, root + len(path)
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
    ) -> CacheView:
        """See `Addressing`."""
        extents = self._extents(rows, starts, cu_queries)
        if parents is None:
            return self._view(cache, extents, mode)
        return self._tree_view(cache, extents, parents.tolist())

    def _extents(self, rows: Tensor, starts: Tensor, cu_queries: Tensor) -> list[Extent]:
        requests, bounds = self._requests(), cu_queries.tolist()
        extents: list[Extent] = []
        for row, start, first, stop in zip(rows.tolist(), starts.tolist(), bounds, bounds[1:], strict=False):
            request = requests[row]
            extents.append(Extent(row, request.generation, request.blocks, first, start, stop - first))
        return extents

    def _view(self, cache: KVCache, extents: Sequence[Extent], mode: Mode) -> CacheView:
        spans = [
            self._span(blocks, first_query, num_queries, start + num_queries, cache.device, mode)
            for _, _, blocks, first_query, start, num_queries in extents
        ]
        return CacheView(cache, SpanBatch(spans), self._backend)

    def _span(
        self, blocks: Sequence[int], start: int, num_queries: int, num_keys: int, device: torch.device, mode: Mode
    ) -> Span:
        """A request's share of a batch whose first query is the batch's `start`-th."""
        used = -(-num_keys // self.block_size)
        if blocks[:used] == list(range(blocks[0], blocks[0] + used)):
            first = blocks[0] * self.block_size
            return Span(start, num_queries, num_keys, slice(first, first + num_keys), device, mode)
        slots = torch.tensor([self.slot(blocks, position) for position in range(num_keys)], device=device)
        return Span(start, num_queries, num_keys, slots, device, mode)

    def slot(self, blocks: Sequence[int], position: int) -> int:
        """Of a position of a request with these blocks."""
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def num_computed(self, rows: Tensor) -> Tensor:
        """See `Addressing`."""
        requests = self._requests()
        return torch.tensor([requests[row].num_computed_tokens for row in rows.tolist()], dtype=torch.int64)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """See `Addressing`."""
        requests, places = self._requests(), zip(rows.tolist(), positions.tolist(), strict=True)
        slots = [self.slot(requests[row].blocks, position) for row, position in places]
        return torch.tensor(slots, dtype=torch.int64, device=rows.device)

    def slots_of_row(self, cache: KVCache, row: int, length: int) -> slice | Tensor:
        """See `Addressing`."""
        return self._span(self._requests()[row].blocks, 0, length, length, cache.device, "causal").slots

    def _requests(self) -> Mapping[int, Request | _Vacant]:
        return {request.row: request for request in self._scheduler.running} or defaultdict(self._vacant)

    def _vacant(self) -> _Vacant:
        return _Vacant(range(self._scheduler.pool.num_blocks))
