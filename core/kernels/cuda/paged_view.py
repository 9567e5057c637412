"""The cache as a pass on a device sees it: everything that varies is a tensor there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...cache.kv_cache import KVCache
from ..attention import Pages, TreeMask
from ..attention_spec import AttentionSpec, Mode, TreeRows
from ..backend import backend_of
from ..trees import Paths
from .block_table import BlockTable


@dataclass(frozen=True)
class PagedView:
    """Where new keys and values go, and what each query sees. Worked out once, shared by layers.

    Tokens behind the last request's belong to nobody: their keys and values go to the pad block.
    """

    cache: KVCache
    table: BlockTable
    rows: Tensor  # [B] int64
    starts: Tensor  # [B] int64, position of each request's first query
    cu_queries: Tensor  # [B+1] int64
    max_queries: int | None = None  # of one request; None: the host does not know
    mode: Mode = "causal"
    tree: TreeRows | None = None  # None: no request has nodes
    _made: dict[int, tuple[Tensor, Pages]] = field(default_factory=dict, repr=False, compare=False)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Store this layer's new keys and values, then attend: [N, Hq, D], [N, Hkv, D], [N, Hkv, Dv] -> [N, Hq, Dv]."""
        slots, pages = self._places(len(query))
        stored_keys, stored_values = self.cache.keys[layer], self.cache.values[layer]
        stored_keys.index_copy_(0, slots, keys)
        stored_values.index_copy_(0, slots, values)
        return backend_of(query.device.type).attend_pages(query, stored_keys, stored_values, pages, spec)

    def attend_stored(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        _, pages = self._places(len(query))
        stored_keys, stored_values = self.cache.keys[layer], self.cache.values[layer]
        return backend_of(query.device.type).attend_pages(query, stored_keys, stored_values, pages, spec)

    def move_paths(self, places: Tensor) -> None:
        assert self.tree is not None, "trees were verified"
        first = self.starts + self.cu_queries.diff() - self.tree.num_nodes
        stored, paths = self.cache.stored, Paths(places, first, self.table.blocks[self.rows], self.cache.block_size)
        backend_of(places.device.type).move_paths(stored, self.cache.sized_addresses, paths)

    def _places(self, num_tokens: int) -> tuple[Tensor, Pages]:
        if num_tokens not in self._made:  # how many there are is the one thing that only the pass itself knows
            self._made[num_tokens] = self._slots(num_tokens), self._pages(num_tokens)
        return self._made[num_tokens]

    def _slots(self, num_tokens: int) -> Tensor:
        token = torch.arange(num_tokens, device=self.rows.device)
        owner = torch.searchsorted(self.cu_queries[1:], token, right=True)  # B for a token of no request
        known = owner.clamp(max=len(self.rows) - 1)
        rows = self.rows[known].masked_fill(owner >= len(self.rows), self.table.pad_row)
        positions = self.starts[known] + token - self.cu_queries[known]
        return self.table.slots(rows, positions, self.cache.block_size)

    def _pages(self, num_tokens: int) -> Pages:
        at_most = num_tokens - len(self.rows) + 1  # each request has one query at least
        return Pages(
            block_table=self.table.blocks[self.rows],
            num_keys=(self.starts + self.cu_queries.diff()).int(),
            cu_queries=self.cu_queries.int(),
            block_size=self.cache.block_size,
            max_queries=self.max_queries or at_most,
            max_keys=self.table.blocks.shape[1] * self.cache.block_size,
            mode=self.mode,
            tree=None if self.tree is None else self._mask(self.tree),
        )

    @staticmethod
    def _mask(tree: TreeRows) -> TreeMask:
        return TreeMask(tree.num_nodes.int(), *backend_of(tree.parents.device.type).tree_masks(tree.parents))
