"""The tensors of a step on a stage: a batch that no target runs, stand-ins for hidden states, junk behind history."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.kernels.attention import SpanBatch
from specdec.core.rejection import DraftRows
from specdec.core.runner.batch import Batch, BatchItem
from specdec.core.runner.kv_cache import CacheView, KVCache

from ..types import StepView, TargetInfo

CPU = torch.device("cpu")
NUM_NOISE_ROWS = 997


class HiddenStandIns:
    """Noise in the place of hidden states. It depends on the token, the position and the layer, as the real ones do."""

    def __init__(self, info: TargetInfo, num_layers: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, info.dtype)
        self._noise = torch.randn(NUM_NOISE_ROWS, info.hidden_size, generator=generator).to(dtype)
        self._layers = range(num_layers)

    def of(self, batch: Batch) -> Tensor:
        """[N, L*H] for the N tokens of a batch."""
        numbers = batch.token_ids * 7919 + batch.positions * 104_729
        return torch.cat([self._noise[(numbers + 31 * layer) % NUM_NOISE_ROWS] for layer in self._layers], dim=1)


def batch_of(items: Sequence[BatchItem]) -> Batch:
    """What views are built from: the tokens of the step and their positions. No target runs."""
    token_ids: list[int] = []
    positions: list[int] = []
    for item in items:
        share = item.scheduled
        token_ids += share.request.token_ids[share.start : share.start + share.num_tokens] + item.draft_token_ids
        positions += range(share.start, share.start + item.num_rows)
    none = torch.empty(0, dtype=torch.int64)
    return Batch(
        items=tuple(items),
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        cache=CacheView(KVCache([], 1, 1, torch.float32, CPU), SpanBatch(())),
        logits_rows=none,
        cu_rows=none,
        drafts=DraftRows(none.view(0, 0), none),
    )


def spoil_history(history: Tensor, view: StepView, dice: random.Random, vocab_size: int) -> None:
    """Put junk behind what is valid of each row: whoever reads there is found out."""
    for row, length in zip(view.rows.tolist(), view.committed_length.tolist(), strict=True):
        history[row, length:] = dice.randrange(vocab_size)
