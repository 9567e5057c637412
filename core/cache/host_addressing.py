"""Slots by the scheduler's lists of blocks: for a CPU, where a request's keys are then a view."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.attention_spec import Mode
from ..kernels.cpu.attention import SpanBatch
from ..kernels.cpu.backend import Backend
from ..request.request import Request
from .addressing import Extent, Rows
from .kv_cache import CacheView, KVCache


@dataclass(frozen=True)
class _Vacant:
    """What stands in a row while no request runs: a proposer may warm up on the whole cache, which is nobody's."""

    blocks: Sequence[int]
    generation: int = 0


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

    def of_rows(self, cache: KVCache, rows: Tensor, starts: Tensor, cu_queries: Tensor, mode: Mode) -> CacheView:
        """See `Addressing`."""
        requests, bounds = self._requests(), cu_queries.tolist()
        extents: list[Extent] = []
        for row, start, first, stop in zip(rows.tolist(), starts.tolist(), bounds, bounds[1:], strict=False):
            request = requests[row]
            extents.append(Extent(row, request.generation, request.blocks, first, start, stop - first))
        return self._view(cache, extents, mode)

    def _view(self, cache: KVCache, extents: Sequence[Extent], mode: Mode) -> CacheView:
        spans = [
            cache.span(blocks, first_query, num_queries, start + num_queries, mode)
            for _, _, blocks, first_query, start, num_queries in extents
        ]
        return CacheView(cache, SpanBatch(spans), self._backend)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """See `Addressing`."""
        requests, size = self._requests(), self.block_size
        places = zip(rows.tolist(), positions.tolist(), strict=True)
        slots = [requests[row].blocks[position // size] * size + position % size for row, position in places]
        return torch.tensor(slots, device=rows.device)

    def slots_of_row(self, cache: KVCache, row: int, length: int) -> slice | Tensor:
        """See `Addressing`."""
        return cache.span(self._requests()[row].blocks, 0, length, length).slots

    def _requests(self) -> Mapping[int, Request | _Vacant]:
        return {request.row: request for request in self._scheduler.running} or defaultdict(self._vacant)

    def _vacant(self) -> _Vacant:
        return _Vacant(range(self._scheduler.pool.num_blocks))
