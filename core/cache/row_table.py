"""The rows of running requests, with the generation and the KV blocks of each."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from .block_pool import BlockPool

if TYPE_CHECKING:
    from ..request.request import Request


class RowTable:
    """Gives the lowest free row, so rows change hands as early as they can. A row's generation tells its owners apart.

    `running`: the requests with a row, in the order in which they got it.
    """

    def __init__(self, num_rows: int, pool: BlockPool) -> None:
        self.pool = pool
        self.running: list[Request] = []
        self._free = list(range(num_rows))
        self._generations = [0] * num_rows

    @property
    def num_free(self) -> int:
        return len(self._free)

    def seat(self, request: Request) -> None:
        """Give a request a row under a new generation."""
        request.row = heapq.heappop(self._free)
        self._generations[request.row] += 1
        request.generation = self._generations[request.row]
        self.running.append(request)

    def unseat(self, request: Request) -> None:
        """Take a request's row and blocks back. The request keeps the number of its row, which no longer is its own."""
        self.running.remove(request)
        self.pool.release(request.blocks)
        heapq.heappush(self._free, request.row)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is owned once, AssertionError unless every row is."""
        self.pool.check_integrity(request.blocks for request in self.running)
        rows = [request.row for request in self.running] + self._free
        assert sorted(rows) == list(range(len(self._generations))), f"rows are owned twice or lost: {sorted(rows)}"
