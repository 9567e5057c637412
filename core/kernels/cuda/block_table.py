"""The blocks of each row, on the device, by which attention and storage there are addressed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...cache.transfer import RowLists, upload


class BlockTable(RowLists):
    """Entries behind a row's blocks, and all of the last row, name a block that no request owns. What computes for
    padding, or past the end of a request, writes there, and no one reads it.
    """

    def __init__(self, num_rows: int, width: int, pad_block: int, device: torch.device) -> None:
        """`width`: blocks of the longest request."""
        self.pad_row = num_rows
        super().__init__(torch.full((num_rows + 1, width + 1), pad_block, dtype=torch.int32, device=device), pad_block)
        self.blocks = self.table[:, :-1]  # [rows+1, P]: the last column is behind the longest request

    def update(self, owned: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Bring rows up to date, each with its generation and the blocks of the request that has it now."""
        changes = self.changes(owned)
        if changes[0]:
            self.write(*upload(changes, self.blocks.device))

    def slots(self, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
        """Where the tokens at (rows [N], positions [N]) lie in a cache: [N] int64."""
        column = (positions // block_size).clamp(max=self.table.shape[1] - 1)
        return self.table[rows, column].long() * block_size + positions % block_size
