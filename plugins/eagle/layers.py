"""The draft layers: those of transformers, the first one changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk import Refusal

from .latent import give_eps

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_LATENT_PROJECTIONS = ("q_a_proj", "kv_a_proj_with_mqa")


def layers_of(decoder: Any, config: Mapping[str, Any]) -> nn.ModuleList:
    """A transformers decoder's layers. Raises Refusal if they are put together in another way than llama's.

    config: theirs. Latent attention has other projections.
    """
    layers: nn.ModuleList = decoder.layers
    if config.get("kv_lora_rank") is not None:
        give_eps(layers, config)
        return layers
    for layer in decoder.layers:
        parts = {name for name, _ in layer.named_children()}
        attention = {name for name, _ in layer.self_attn.named_children()} if "self_attn" in parts else set()
        if parts != _LAYER_PARTS or not attention.issuperset(_PROJECTIONS):
            found = ", ".join(sorted(parts | attention))
            reason = f"its layers, of type {type(layer).__name__}, are made of {found}"
            raise Refusal(reason, "layers of the llama or qwen3 type")
    return layers


def run_layers(
    layers: Iterable[nn.Module], states: Tensor, rotary: tuple[Tensor, Tensor], attention: Mapping[str, Any]
) -> Tensor:
    """Ordinary decoder layers on states [1, M, h]."""
    for layer in layers:
        states = layer(states, attention_mask=None, position_embeddings=rotary, **attention)
    return states


class PairLayer(nn.Module):
    """A decoder layer whose attention reads a token's embedding beside the state; the embedding goes no further."""

    def __init__(
        self, layer: Any, embedding_size: int, eps: float, *, has_hidden_norm: bool, norm_before_residual: bool
    ) -> None:
        """`layer`: of transformers. Its norms, MLP and output projection are kept."""
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.post_attention_layernorm = layer.post_attention_layernorm
        width = layer.input_layernorm.weight.shape[0]
        self.input_layernorm = nn.RMSNorm(embedding_size, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps) if has_hidden_norm else nn.Identity()
        self._norm_before_residual = norm_before_residual
        for name, old in list(self.self_attn.named_children()):
            if name not in _PROJECTIONS + _LATENT_PROJECTIONS:
                continue
            new = nn.Linear(embedding_size + width, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, new)

    def forward(
        self, embedded: Tensor, states: Tensor, rotary: tuple[Tensor, Tensor], attention: Mapping[str, Any]
    ) -> Tensor:
        """New states [1, M, h] for embeddings [1, M, E] and states [1, M, h]."""
        normed = self.hidden_norm(states)
        pair = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        attended, _ = self.self_attn(pair, position_embeddings=rotary, attention_mask=None, **attention)
        states = (normed if self._norm_before_residual else states) + attended
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output
