"""The tensors of a step on a stage: stand-ins for what a target computes."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core.host import CacheView, ForwardInput, TargetOutput
from specdec.sdk.types import TargetInfo

NUM_NOISE_ROWS = 997


class StandInTarget:
    """Computes noise in the place of hidden states and of cached keys, and of logits if they are shown.

    The noise depends on the token, the position and the layer, as real hidden states do.
    """

    def __init__(self, info: TargetInfo, num_layers: int, seed: int, *, shows_logits: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, info.dtype)
        self._noise = torch.randn(NUM_NOISE_ROWS, info.hidden_size, generator=generator).to(dtype)
        self._layers = range(num_layers)
        self._entries = torch.arange(info.vocab_size if shows_logits else 0)

    def forward(self, inputs: ForwardInput) -> TargetOutput:
        """Stand in for a pass of the target: made-up hidden states, and no logits."""
        numbers = inputs.token_ids * 7919 + inputs.positions * 104_729
        hidden = [self._noise[(numbers + 31 * layer) % NUM_NOISE_ROWS] for layer in self._layers]
        drawn = numbers[inputs.logits_rows, None] % NUM_NOISE_ROWS
        logits = torch.sin(drawn * 0.7 + self._entries * 1.3)  # [R, V], or [R, 0]
        if isinstance(inputs.cache, CacheView):
            _store_noise(inputs.cache, numbers % NUM_NOISE_ROWS)
        return TargetOutput(logits, tuple(hidden))


def _store_noise(view: CacheView, numbers: Tensor) -> None:
    """Keys and values of the tokens of a pass, in every layer that the cache has. numbers: of each token, [N]."""
    cache = view.cache
    for place, stored in enumerate([*cache.keys, *cache.values]):
        _, num_heads, dim = stored.shape
        entries = torch.arange(num_heads * dim).view(num_heads, dim)
        stored[view.batch.slots] = torch.sin(numbers[:, None, None] * 0.9 + entries * 1.7 + place).to(stored.dtype)
