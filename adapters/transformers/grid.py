"""A pass over texts of different lengths as the rectangle that a model of transformers takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from specdec.core.host import Scheduled


@dataclass(frozen=True)
class Grid:
    """The newest tokens of all rows stand in one column: padding lies before them, drafts and more padding behind.

    Before the first pass over a row nothing of it is cached, so what it sees has no holes.
    """

    shares: Sequence[Scheduled]
    rows: Sequence[int]  # of the shares, in the rectangle
    held: Sequence[int]  # tokens of each row in the cache
    device: torch.device

    @cached_property
    def newest(self) -> int:
        """The column of the newest tokens."""
        return max(share.num_tokens for share in self.shares) - 1

    @cached_property
    def width(self) -> int:
        return self.newest + 1 + max(share.num_draft_tokens for share in self.shares)

    @cached_property
    def last_read(self) -> int:
        """The last column whose logits are read: that of the last draft, if the pass is there to sample."""
        return self.width - 1 if any(share.samples for share in self.shares) else self.newest

    @cached_property
    def places(self) -> list[int]:
        """Where the tokens of the shares, one after the other, lie in the rectangle."""
        return [
            row * self.width + self.newest + 1 - share.num_tokens + i
            for row, share in zip(self.rows, self.shares, strict=True)
            for i in range(share.num_rows)
        ]

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """First and last row of each share's logits, which lie one share after the other."""
        return list(pairwise(accumulate((share.num_draft_tokens + 1 for share in self.shares), initial=0)))

    def spread(self, tokens: Tensor) -> Tensor:
        """[N] of the shares, one after the other -> [B, width], 0 in padding."""
        if self._is_full:
            return tokens.view(len(self.held), self.width)
        grid = tokens.new_zeros(len(self.held) * self.width)
        grid[self._sent(self.places)] = tokens
        return grid.view(len(self.held), self.width)

    def gather(self, grid: Tensor) -> Tensor:
        """[B * width, ...] -> [N, ...] of the shares, one after the other."""
        return grid if self._is_full else grid[self._sent(self.places)]

    def gather_logits(self, columns: Tensor) -> Tensor:
        """[B, columns that are read, V] -> [R, V]: of the newest token and the drafts of each share."""
        flat = columns.flatten(0, 1)
        pairs = zip(self.rows, self.shares, strict=True)
        rows = [row * columns.shape[1] + i for row, share in pairs for i in range(share.num_draft_tokens + 1)]
        return flat if rows == list(range(len(flat))) else flat[self._sent(rows)]

    @cached_property
    def padding(self) -> list[int]:
        """Columns before the tokens of each row that begins here; 0 in other rows, which have tokens in the cache."""
        padding = [0] * len(self.held)
        for row, share in zip(self.rows, self.shares, strict=True):
            padding[row] = self.newest + 1 - share.num_tokens
        return padding

    def mask(self) -> Tensor | None:
        """What each row sees of the cache and of itself: [B, cached + width] int64. None: everything."""
        cached = max(self.held)
        if min(self.held) == cached and not any(self.padding):
            return None
        rows = [
            [0] * (cached - held) + [1] * held + [0] * padding + [1] * (self.width - padding)
            for held, padding in zip(self.held, self.padding, strict=True)
        ]
        return torch.tensor(rows, device=self.device)

    @cached_property
    def _is_full(self) -> bool:
        return self.places == list(range(len(self.held) * self.width))

    def _sent(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, device=self.device)
