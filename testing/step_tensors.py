"""The tensors of a step on a stage: tokens that no target runs, stand-ins for hidden states, junk behind history."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.runner.batch import BatchItem
from specdec.sdk.types import StepView, TargetInfo

NUM_NOISE_ROWS = 997


class StepTokens(NamedTuple):
    """The tokens of a step, drafts included."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64


class HiddenStandIns:
    """Noise in the place of hidden states. It depends on the token, the position and the layer, as the real ones do."""

    def __init__(self, info: TargetInfo, num_layers: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, info.dtype)
        self._noise = torch.randn(NUM_NOISE_ROWS, info.hidden_size, generator=generator).to(dtype)
        self._layers = range(num_layers)

    def of(self, tokens: StepTokens) -> Tensor:
        """[N, L*H] for the N tokens of a step."""
        numbers = tokens.token_ids * 7919 + tokens.positions * 104_729
        return torch.cat([self._noise[(numbers + 31 * layer) % NUM_NOISE_ROWS] for layer in self._layers], dim=1)


def tokens_of(items: Sequence[BatchItem], drafted: Sequence[list[int]]) -> StepTokens:
    """What views are built from: the tokens of the step and their positions. No target runs."""
    token_ids: list[int] = []
    positions: list[int] = []
    for item, drafts in zip(items, drafted, strict=True):
        share = item.scheduled
        token_ids += share.request.token_ids[share.start : share.start + share.num_tokens] + drafts
        positions += range(share.start, share.start + item.num_rows)
    return StepTokens(torch.tensor(token_ids), torch.tensor(positions))


def spoil_history(history: Tensor, view: StepView, dice: random.Random, vocab_size: int) -> None:
    """Put junk behind what is valid of each row: whoever reads there is found out."""
    for row, length in zip(view.rows.tolist(), view.committed_length.tolist(), strict=True):
        history[row, length:] = dice.randrange(vocab_size)
