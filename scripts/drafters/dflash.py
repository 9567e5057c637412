"""DFlash (https://arxiv.org/abs/2602.06036) in the `speculators` format: a whole block of drafts in one pass.

The context is made of target features only. The block's slots are the anchor (the newest token, not yet run by the
target) and mask tokens; each slot sees the context before the anchor and every slot of its block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layers import Dims, Qwen3Layer, RMSNorm, per_query_head
from .speculators import layer_config, proposal
from .target import Observation

DIMS = Dims()
BOUNDARIES = (2, 4, 5)
BLOCK_SIZE = 8
NUM_LAYERS = 2


class BlockMemory:
    """The context rows of one layer, for blocks side by side that do not see each other."""

    def __init__(self, keys: Tensor, values: Tensor, anchors: Tensor, block_size: int) -> None:
        """`keys`, `values`: [B, KV, T, D]; `anchors` [M]: how many context rows each block sees."""
        self._keys, self._values, self._block_size = keys, values, block_size
        before = torch.arange(keys.shape[2]) < anchors[:, None]
        self._visible = before.repeat_interleave(block_size, dim=0)  # [M * block_size, T]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, k, v = (per_query_head(x, q.shape[1]).to(q.dtype) for x in (self._keys, self._values, k, v))
        q, k, v = (x.unflatten(2, (-1, self._block_size)) for x in (q * q.shape[-1] ** -0.5, k, v))
        context = (q.flatten(2, 3) @ keys.transpose(-1, -2)).masked_fill(~self._visible, float("-inf"))
        block = (q @ k.transpose(-1, -2)).flatten(2, 3)
        weights = torch.cat([context, block], dim=-1).softmax(-1)
        on_context, on_block = weights.split([keys.shape[2], self._block_size], dim=-1)
        return on_context @ values + (on_block.unflatten(2, (-1, self._block_size)) @ v).flatten(2, 3)


class DFlash(nn.Module):
    """Embedding and language-model head are the target's, read but not saved."""

    def __init__(
        self,
        embedding: Tensor,
        unembedding: Tensor,
        mask_token_id: int,
        *,
        dims: Dims = DIMS,
        num_layers: int = NUM_LAYERS,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(len(BOUNDARIES) * dims.hidden, dims.hidden, bias=False)
        self.hidden_norm = RMSNorm(dims.hidden, dims.eps)
        self.layers = nn.ModuleList([Qwen3Layer(dims) for _ in range(num_layers)])
        self.norm = RMSNorm(dims.hidden, dims.eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("unembedding", unembedding, persistent=False)
        self.mask_token_id, self.block_size = mask_token_id, block_size

    def forward(self, features: Tensor, anchor_tokens: Tensor, anchors: Tensor) -> Tensor:
        """The logits of slots 1.. of each block, [B, M, BLOCK_SIZE - 1, V]. See `outputs`."""
        return self.logits(self.outputs(features, anchor_tokens, anchors)[:, :, 1:])

    def logits(self, outputs: Tensor) -> Tensor:
        """[..., h] -> [..., V]"""
        return outputs.to(self.unembedding.dtype) @ self.unembedding.T

    def outputs(self, features: Tensor, anchor_tokens: Tensor, anchors: Tensor) -> Tensor:
        """What every slot of each block gives, behind the final norm: [B, M, block_size, h].

        `features` [B, T, A * H] of context positions; `anchor_tokens` [B, M] at the positions `anchors` [M].
        """
        context = self.hidden_norm(self.fc(features))
        context_positions = torch.arange(features.shape[1])
        positions = (anchors[:, None] + torch.arange(self.block_size)).flatten()
        masks = torch.full((*anchor_tokens.shape, self.block_size - 1), self.mask_token_id)
        slots = torch.cat([anchor_tokens[..., None], masks], dim=-1).flatten(1)
        x = self.embedding[slots].float()
        for layer in self.layers:
            keys, values = layer.self_attn.keys_and_values(context, context_positions)
            x = layer(x, positions, BlockMemory(keys, values, anchors, self.block_size))
        return self.norm(x).unflatten(1, (-1, self.block_size))

    @staticmethod
    def features(observation: Observation) -> Tensor:
        return observation.features(BOUNDARIES)

    @torch.no_grad()
    def draft(self, features: Tensor, bonus: Tensor) -> Tensor:
        """Greedy drafts [B, BLOCK_SIZE - 1] after `bonus` [B], given features [B, n, *] of positions before it."""
        return self(features, bonus[:, None], torch.tensor([features.shape[1]]))[:, 0].argmax(-1)


def config(vocab_size: int, mask_token_id: int) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "aux_hidden_state_layer_ids": list(BOUNDARIES),
        "mask_token_id": mask_token_id,
        "draft_vocab_size": vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "speculators_config": proposal("dflash", BLOCK_SIZE - 1),
        "transformer_layer_config": layer_config(
            "qwen3",
            DIMS,
            NUM_LAYERS,
            vocab_size,
            layer_types=["full_attention"] * NUM_LAYERS,
            sliding_window=None,
            use_sliding_window=False,
        ),
    }
