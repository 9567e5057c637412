"""Multi-token prediction inside the target's folder, tensors named as in Qwen3-Next and Qwen3.5.

One decoder layer of the target's own kind on [normed embedding; normed state]. The state is the target's hidden state
after the final norm, or the module's own output after `mtp.norm`; the target's head reads that output.
"""

from __future__ import annotations

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

    def __init__(self, embedding: Tensor, unembedding: Tensor) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(DIMS.hidden, DIMS.eps)
        self.pre_fc_norm_hidden = RMSNorm(DIMS.hidden, DIMS.eps)
        self.fc = nn.Linear(2 * DIMS.hidden, DIMS.hidden, bias=False)
        self.layers = nn.ModuleList([Qwen3Layer(DIMS)])
        self.norm = RMSNorm(DIMS.hidden, DIMS.eps)
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
