"""Replays of blocks that are walked from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from make_dflash import Replay
from torch import Tensor

RANK = 8


@dataclass
class Walked:
    """A block: its tokens, and what each was taken from."""

    ids: list[int]  # of the target
    logits: Tensor  # [K, D]


class WalkReplay(Replay):
    """Replays that take tokens from left to right. `given`: tokens that were drawn instead of the most likely ones."""

    @torch.no_grad()
    def walked(self, tokens: Sequence[int], length: int, k: int, given: Sequence[int] = ()) -> Walked:
        raise NotImplementedError

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], length: int, k: int, context: int | None = None) -> list[int]:
        return self.walked(tokens, length, k).ids

    def chosen(self, logits: Tensor, given: Sequence[int], index: int) -> int:
        """The target's id."""
        if index < len(given):
            return given[index]
        best = int(logits.argmax())
        return best + int(self.t["d2t"][best]) if "d2t" in self.t else best


def small(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
