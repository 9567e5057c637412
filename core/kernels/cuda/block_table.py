"""The blocks of each row, on the device, by which attention and storage there are addressed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...cache.transfer import upload


class BlockTable:
    """Kept from step to step; only blocks that are new are sent.

    Entries behind a row's blocks, and all of the last row, name a block that no request owns. What computes for
    padding, or past the end of a request, writes there, and no one reads it.
    """

    def __init__(self, num_rows: int, width: int, pad_block: int, device: torch.device) -> None:
        """`width`: blocks of the longest request."""
        self.pad_row = num_rows
        self._all = torch.full((num_rows + 1, width + 1), pad_block, dtype=torch.int32, device=device)
        self.blocks = self._all[:, :-1]  # [rows+1, P]: the last column is behind the longest request
        self._pad_block = pad_block
        self._sent: dict[int, tuple[int, int]] = {}  # row -> generation, number of blocks
        self._coming: dict[int, tuple[int, int]] = {}  # the same of what is not written yet

    def update(self, owned: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Bring rows up to date, each with its generation and the blocks of the request that has it now."""
        changes = self.changes(owned)
        if changes[0]:
            self.write(*upload(changes, self.blocks.device))

    def changes(self, owned: Iterable[tuple[int, int, Sequence[int]]]) -> tuple[list[int], list[int]]:
        """What `update` would write: places in the table, and the blocks there. `write` comes next."""
        interrupted, self._coming = self._coming, {}
        for row, (_, count) in interrupted.items():  # which may be written, or not
            self._sent[row] = -1, max(count, self._sent.get(row, (-1, 0))[1])
        places: list[int] = []
        entries: list[int] = []
        for row, generation, blocks in owned:
            of, count = self._sent.get(row, (generation, 0))
            same = count if of == generation else 0
            if same != count or same != len(blocks):
                new = [*blocks[same:], *[self._pad_block] * (count - len(blocks))]
                first = row * self._all.shape[1] + same
                places += range(first, first + len(new))
                entries += new
                self._coming[row] = (generation, len(blocks))
        return places, entries

    def write(self, places: Tensor, entries: Tensor) -> None:
        """Put entries [n] at their places [n]: the last `changes`."""
        if len(places):
            self._all.view(-1).index_copy_(0, places, entries.int())
        self._sent, self._coming = self._sent | self._coming, {}

    def slots(self, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
        """Where the tokens at (rows [N], positions [N]) lie in a cache: [N] int64."""
        column = (positions // block_size).clamp(max=self._all.shape[1] - 1)
        return self._all[rows, column].long() * block_size + positions % block_size
