"""EAGLE-1 (https://arxiv.org/abs/2401.15077) in the layout of its authors' checkpoints.

The state is the target's hidden state after the final norm, and the drafter's output is its guess of the next one, so
the target's own head reads it. The one layer has no input norm, and nothing follows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layers import Attention, Dims, GatedMLP, Memory, RMSNorm
from .target import Observation

DIMS = Dims()


class EagleLayer(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.self_attn = Attention(dims, dims.hidden, qk_norm=False)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = GatedMLP(dims)

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        x = x + self.self_attn(x, positions, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle(nn.Module):
    """Embedding and language-model head are the target's, read but not saved."""

    def __init__(self, embedding: Tensor, unembedding: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * DIMS.hidden, DIMS.hidden, bias=True)
        self._start_fc(embedding)
        self.layers = nn.ModuleList([EagleLayer(DIMS)])
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("unembedding", unembedding, persistent=False)

    @torch.no_grad()
    def _start_fc(self, embedding: Tensor) -> None:
        """Begin with the feature as it is plus the embedding, turned and brought to the feature's scale.

        Nothing normalises the two, and embeddings are an order of magnitude smaller than features.
        """
        turned, kept = self.fc.weight.split(DIMS.hidden, dim=1)
        nn.init.orthogonal_(turned).div_(embedding.float().std())
        nn.init.eye_(kept)
        nn.init.zeros_(self.fc.bias)

    def features(self, observation: Observation) -> Tensor:
        return observation.final

    def first_states(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([self.embedding[tokens], states], dim=-1)).float()
        states = self.layers[0](x, positions, memory)
        return states.to(self.unembedding.dtype) @ self.unembedding.T, states

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def config(vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": True,
        "eos_token_id": eos_token_id,
        "head_dim": DIMS.head_dim,
        "hidden_act": "silu",
        "hidden_size": DIMS.hidden,
        "intermediate_size": DIMS.ffn,
        "max_position_embeddings": 4096,
        "num_attention_heads": DIMS.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": DIMS.kv_heads,
        "rms_norm_eps": DIMS.eps,
        "rope_scaling": None,
        "rope_theta": DIMS.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
    }
