"""Slots by a block table on the device: nothing that a pass needs is read back from there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sdk.errors import UnsupportedModelError

from ..kernels.attention_spec import Mode
from .addressing import Extent, Rows
from .block_table import BlockTable
from .kv_cache import KVCache
from .paged_view import PagedView


class DeviceAddressing:
    """See `Addressing`. The table is brought up to date with every batch; passes in between find it so."""

    num_pad_blocks = 1

    def __init__(self, scheduler: Rows, num_rows: int, width: int, device: torch.device) -> None:
        """`width`: blocks of the longest request."""
        self.block_size = scheduler.pool.block_size
        self.table = BlockTable(num_rows, width, scheduler.pool.num_blocks, device)

    def columns(self, extents: Sequence[Extent]) -> list[list[int]]:
        """See `Addressing`."""
        rows = [extent.row for extent in extents]
        starts = [extent.start for extent in extents]
        bounds = [0, *(extent.first_query + extent.num_queries for extent in extents)]
        changes = self.table.changes((extent.row, extent.generation, extent.blocks) for extent in extents)
        return [rows, starts, bounds, *changes]

    def of_batch(self, cache: KVCache, extents: Sequence[Extent], columns: Sequence[Tensor]) -> PagedView:
        """See `Addressing`."""
        rows, starts, cu_queries, places, entries = columns
        self.table.write(places, entries)
        most = max(extent.num_queries for extent in extents)
        return PagedView(cache, self.table, rows, starts, cu_queries, most)

    def of_trees(self, cache: KVCache, extents: Sequence[Extent], parents: Sequence[Sequence[int]]) -> PagedView:
        """See `Addressing`. No kernel has a mask for trees yet."""
        raise self._no_trees()

    def extents(self, rows: Tensor, starts: Tensor, cu_queries: Tensor) -> list[Extent]:
        """See `Addressing`."""
        raise self._no_trees()

    def _no_trees(self) -> UnsupportedModelError:
        facts = {"device": self.table.blocks.device, "fix": "leave num_draft_nodes out, or serve on a CPU"}
        return UnsupportedModelError("SD-E296", "attention on this device serves no trees", facts)

    def of_rows(self, cache: KVCache, rows: Tensor, starts: Tensor, cu_queries: Tensor, mode: Mode) -> PagedView:
        """See `Addressing`."""
        return PagedView(cache, self.table, rows, starts, cu_queries, None, mode)

    def num_computed(self, rows: Tensor) -> None:
        """See `Addressing`."""
        return None

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """See `Addressing`."""
        return self.table.slots(rows, positions, self.block_size)

    def slots_of_row(self, cache: KVCache, row: int, length: int) -> Tensor:
        """See `Addressing`."""
        positions = torch.arange(length, device=cache.device)
        return self.slots(torch.full_like(positions, row), positions)
