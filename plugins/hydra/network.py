"""The Hydra heads (arXiv 2402.05109). Letters: M rows of all requests, b requests, H hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .checkpoint import HydraSpec


class HydraHeads(nn.Module):
    """A layer over the target's final hidden states, and heads that read its output beside tokens.

    Fill its weights, then set the embedding, before it is run.
    """

    embedding: nn.Module  # of target ids

    def __init__(self, spec: HydraSpec, decoder: Any, num_heads: int) -> None:
        """`decoder`: transformers' layer for `spec.decoder`."""
        super().__init__()
        self.layer, self.norm, self.rotary = decoder.layers[0], decoder.norm, decoder.rotary_emb
        self.blocks = nn.ModuleList([_blocks(spec, head) for head in range(num_heads)])
        self.lm_heads = nn.ModuleList([nn.Linear(spec.hidden_size, spec.vocab_size) for _ in range(num_heads)])
        self._width, self._logit_scale = spec.hidden_size, spec.logit_scale

    def forward(self, hidden: Tensor, positions: Tensor, attention: Mapping[str, Any]) -> Tensor:
        """The prefix [M, H] of rows that read the target's final hidden states [M, H]."""
        states = hidden.to(self.norm.weight.dtype)[None]
        rotary = self.rotary(states, positions[None])
        output = self.layer(states, attention_mask=None, position_embeddings=rotary, **attention)
        prefix: Tensor = self.norm(output)[0]
        return prefix

    def with_token(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """States [b, S] with the embedding of one more token behind them: [b, S + H]."""
        return torch.cat([states, self.embedding(token_ids).to(states.dtype)], dim=-1)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [b, V] of states [b, (i + 2) * H], the prefix and i + 1 tokens, by head i."""
        index = states.shape[-1] // self._width - 2
        logits: Tensor = self.lm_heads[index](self.blocks[index](states))
        return logits if self._logit_scale == 1 else logits * self._logit_scale


class Block(nn.Module):
    """A linear layer beside a residual one; the first of a head brings its inputs to one width."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.res_connection = nn.Linear(inputs, width) if inputs != width else nn.Identity()

    def forward(self, states: Tensor) -> Tensor:
        """[b, width] of [b, inputs]."""
        output: Tensor = self.res_connection(states) + silu(self.linear(states))
        return output


def _blocks(spec: HydraSpec, head: int) -> nn.Sequential:
    width = spec.hidden_size
    return nn.Sequential(Block((head + 2) * width, width), *[Block(width, width) for _ in range(spec.num_layers - 1)])
