"""Slots of the cache for a request's positions: where a pass finds its keys and puts its new ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from ..kernels.attention_spec import AttentionContext, Mode, StoredAttention, TreeAttention, TreeRows
from ..request.request import Request, Scheduled
from .block_pool import BlockPool
from .kv_cache import KVCache

Trees = Sequence[Sequence[int]]
"""The parents of each request's nodes."""


class Rows(Protocol):
    """The rows and blocks of requests: those of the scheduler, or of an adapter's table."""

    @property
    def pool(self) -> BlockPool: ...
    @property
    def running(self) -> list[Request]: ...


class BlockTable(Protocol):
    """The blocks of each row, on a device."""

    pad_row: int  # the row that no request has

    def update(self, owned: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Bring rows up to date, each with its generation and the blocks of the request that has it now."""
        ...


class Addressing(Protocol):
    """Shared by the caches that lie on the same blocks."""

    @property
    def block_size(self) -> int: ...

    @property
    def table(self) -> BlockTable | None:
        """Blocks by row on the device, which captured work reads. None: the host's lists address."""
        ...

    @property
    def num_pad_blocks(self) -> int:
        """Blocks that a cache has beyond those of the pool."""
        ...

    def columns(self, shares: Sequence[Scheduled]) -> list[list[int]]:
        """The lists that `of_batch` reads on the device: they travel with the batch's own."""
        ...

    def of_batch(self, cache: KVCache, shares: Sequence[Scheduled], columns: Sequence[Tensor]) -> AttentionContext:
        """A cache as a batch sees it whose requests are known to the host, in the order of their queries.

        `columns`: those of the same shares.
        """
        ...

    def of_trees(
        self, cache: KVCache, shares: Sequence[Scheduled], columns: Sequence[Tensor], trees: TreeRows, parents: Trees
    ) -> TreeAttention:
        """Address a batch whose last positions in each share are nodes: each sees what lies before the tree, and its
        own path. The host knows the same `parents` as the device.
        """
        ...

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
        ...

    def num_computed(self, rows: Tensor) -> Tensor:
        """Positions of each row that the target has computed, [N] int64, where the host knows them: without a table."""
        ...

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots [N] int64 of the tokens at (rows [N], positions [N])."""
        ...

    def slots_of_row(self, cache: KVCache, row: int, length: int) -> slice | Tensor:
        """Slots of a row's first positions; a slice where blocks are adjacent and the host knows it."""
        ...
