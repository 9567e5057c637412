"""Medusa (https://arxiv.org/abs/2401.10774) in vLLM's layout, each head over a truncated vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .target import Observation

HIDDEN = 256
NUM_HEADS = 3
NUM_LAYERS = 1
TRUNCATED_VOCAB_SIZE = 2048


class ResBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(NUM_LAYERS)])
        for layer in self.layers:
            nn.init.zeros_(layer.weight)  # every head begins as the target's own

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + silu(layer(x))
        return x


class Medusa(nn.Module):
    """`chosen` [D] int64: the target ids of the truncated vocabulary, ascending."""

    def __init__(self, chosen: Tensor, unembedding: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ResBlock() for _ in range(NUM_HEADS)])
        self.lm_heads = nn.ModuleList([nn.Linear(HIDDEN, len(chosen), bias=False) for _ in range(NUM_HEADS)])
        for head in self.lm_heads:
            head.weight = nn.Parameter(unembedding[chosen].float().clone())
        self.register_buffer("token_map", chosen)

    def forward(self, features: Tensor) -> Tensor:
        """Logits of the tokens 2, 3, .. positions after those of `features` [..., H]: [..., NUM_HEADS, D]."""
        guesses = [head(block(features)) for block, head in zip(self.blocks, self.lm_heads, strict=True)]
        return torch.stack(guesses, dim=-2)

    @staticmethod
    def features(observation: Observation) -> Tensor:
        return observation.final

    @torch.no_grad()
    def draft(self, features: Tensor) -> Tensor:
        """Greedy drafts [B, NUM_HEADS] after the bonus token, given the features [B, n, H] that produced it."""
        return self.token_map[self(features[:, -1]).argmax(-1)]


def config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "vocab_size": vocab_size,
        "num_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "truncated_vocab_size": TRUNCATED_VOCAB_SIZE,
        "medusa_fc_bias": False,
        "original_lm_head": False,
    }
