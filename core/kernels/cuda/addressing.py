"""Slots by a block table on the device: nothing that a pass needs is read back from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...cache.addressing import Addressing, Trees
from ...cache.kv_cache import KVCache
from ...cache.row_table import RowTable
from ...request.request import Scheduled
from ..attention_spec import Mode, TreeRows
from .block_table import BlockTable
from .paged_view import PagedView


class DeviceAddressing(Addressing):
    """The form of `Addressing` with a block table on the device. Every batch brings the table up to date for the passes
    after it.
    """

    table: BlockTable

    def __init__(self, rows: RowTable, num_rows: int, width: int, device: torch.device) -> None:
        """`width`: blocks of the longest request."""
        pool = rows.pool
        self.block_size = pool.block_size
        self.num_pad_blocks = int(pool.null_block is None)
        pad_block = pool.num_blocks if pool.null_block is None else pool.null_block
        self.table = BlockTable(num_rows, width, pad_block, device)

    def columns(self, shares: Sequence[Scheduled]) -> list[list[int]]:
        rows = [share.request.row for share in shares]
        starts = [share.start for share in shares]
        bounds = [0, *(share.first_token + share.num_rows for share in shares)]
        owners = (share.request for share in shares)
        changes = self.table.changes((owner.row, owner.generation, owner.blocks) for owner in owners)
        return [rows, starts, bounds, *changes]

    def of_batch(self, cache: KVCache, shares: Sequence[Scheduled], columns: Sequence[Tensor]) -> PagedView:
        rows, starts, cu_queries, places, entries = columns
        self.table.write(places, entries)
        most = max(share.num_rows for share in shares)
        return PagedView(cache, self.table, rows, starts, cu_queries, most)

    def of_trees(
        self, cache: KVCache, shares: Sequence[Scheduled], columns: Sequence[Tensor], trees: TreeRows, parents: Trees
    ) -> PagedView:
        return replace(self.of_batch(cache, shares, columns), tree=trees)

    def of_rows(
        self,
        cache: KVCache,
        rows: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        mode: Mode,
        parents: Tensor | None = None,
    ) -> PagedView:
        tree = None if parents is None else TreeRows(parents, torch.full_like(rows, parents.shape[1]))
        return PagedView(cache, self.table, rows, starts, cu_queries, None, mode, tree)

    def num_computed(self, rows: Tensor) -> Tensor:
        raise NotImplementedError("rows lie on the device, and reading them would wait for it")

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self.table.slots(rows, positions, self.block_size)

    def slots_of_row(self, cache: KVCache, row: int, length: int) -> Tensor:
        positions = torch.arange(length, device=cache.device)
        return self.slots(torch.full_like(positions, row), positions)
