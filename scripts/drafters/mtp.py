"""Multi-token prediction inside the target's folder, tensors named as in Qwen3-Next and Qwen3.5.

One decoder layer of the target's own kind on [normed embedding; normed state]. The state is the target's hidden state
after the final norm, or the module's own output after `mtp.norm`; the target's head reads that output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .layers import Dims, Memory, Qwen3Layer, RMSNorm
from .target import Observation

DIMS = Dims()
FILE_NAME = "mtp.safetensors"
PREFIX = "mtp."
CONFIG_KEY = "mtp_num_hidden_layers"


class Mtp(nn.Module):
    """Embedding and language-model head are the target's, read but not saved."""

    def __init__(
        self,
        embedding: Tensor,
        unembedding: Tensor,
        dims: Dims = DIMS,
        layer: Callable[[Dims], nn.Module] = Qwen3Layer,
        norm: Callable[[int, float], nn.Module] = RMSNorm,
    ) -> None:
        """layer, norm: those of the target's kind."""
        super().__init__()
        self.pre_fc_norm_embedding = norm(dims.hidden, dims.eps)
        self.pre_fc_norm_hidden = norm(dims.hidden, dims.eps)
        self.fc = nn.Linear(2 * dims.hidden, dims.hidden, bias=False)
        self.layers = nn.ModuleList([layer(dims)])
        self.norm = norm(dims.hidden, dims.eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("unembedding", unembedding, persistent=False)

    def features(self, observation: Observation) -> Tensor:
        return observation.final

    def first_states(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        pair = [self.pre_fc_norm_embedding(self.embedding[tokens]), self.pre_fc_norm_hidden(states)]
        x = self.fc(torch.cat(pair, dim=-1)).float()
        states = self.norm(self.layers[0](x, positions, memory))
        return states.to(self.unembedding.dtype) @ self.unembedding.T, states

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids
