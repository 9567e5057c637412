"""EAGLE-3 (https://arxiv.org/abs/2503.01840) in the `speculators` format, one layer of the Llama type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layers import Attention, Dims, GatedMLP, Memory, RMSNorm
from .speculators import layer_config, proposal
from .target import Observation

DIMS = Dims(ffn=768)
BOUNDARIES = (2, 4, 5)
DRAFT_VOCAB_SIZE = 2048


class Eagle3Layer(nn.Module):
    """Attention over [embedding; state]; with `norm_before_residual` the residual is the normed state."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.hidden_norm = RMSNorm(dims.hidden, dims.eps)
        self.self_attn = Attention(dims, 2 * dims.hidden, qk_norm=False)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = GatedMLP(dims)

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        normed = self.hidden_norm(states)
        pair = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        x = normed + self.self_attn(pair, positions, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """`chosen` [D] int64: the target ids of the draft vocabulary, ascending. Embedding and head stay the target's."""

    def __init__(self, chosen: Tensor, embedding: Tensor, unembedding: Tensor) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.float().clone(), freeze=True)
        self.fc = nn.Linear(len(BOUNDARIES) * DIMS.hidden, DIMS.hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(DIMS)])
        self.norm = RMSNorm(DIMS.hidden, DIMS.eps)
        self.lm_head = nn.Linear(DIMS.hidden, len(chosen), bias=False)
        self.lm_head.weight = nn.Parameter(unembedding[chosen].float().clone(), requires_grad=False)
        self.register_buffer("d2t", chosen - torch.arange(len(chosen)))
        self.register_buffer("t2d", torch.zeros(len(embedding), dtype=torch.bool).index_fill(0, chosen, True))

    def features(self, observation: Observation) -> Tensor:
        return observation.features(BOUNDARIES)

    def first_states(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        states = self.layers[0](self.embed_tokens(tokens), states, positions, memory)
        return self.lm_head(self.norm(states)), states

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]


def config(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(BOUNDARIES),
        "tie_word_embeddings": False,
        "speculators_config": proposal("eagle3", 5),
        "transformer_layer_config": layer_config("llama", DIMS, 1, vocab_size, mlp_bias=False),
    }
