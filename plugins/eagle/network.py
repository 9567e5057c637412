"""The EAGLE networks. Letters: M rows of all requests, h the network's width, E the embedding's, H the target's,
A hidden states of the target, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk import Refusal

from .eagle3_spec import Eagle3Spec
from .eagle_spec import EagleSpec

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_LATENT_PROJECTIONS = ("q_a_proj", "kv_a_proj_with_mqa")
_NORMS = {"q_a_layernorm": "q_lora_rank", "kv_a_layernorm": "kv_lora_rank"}


class EagleNetwork(nn.Module):
    """EAGLE-1 (arXiv 2401.15077): guesses the target's next final hidden state from the last one and the token after.

    Fill its weights, then set what may be the target's, before it is run.
    """

    embedding: nn.Module  # of target ids
    head: nn.Module

    def __init__(self, spec: EagleSpec, decoder: Any) -> None:
        """`decoder`: transformers' layers for `spec.decoder`. Raises Refusal if they are not served here."""
        super().__init__()
        self.fc = nn.Linear(spec.embedding_size + spec.hidden_size, spec.hidden_size, bias=spec.has_fc_bias)
        self.layers, self.rotary = _layers_of(decoder, spec.decoder), decoder.rotary_emb
        self.layers[0].input_layernorm = nn.Identity()

    def forward(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, attention: Mapping[str, Any]) -> Tensor:
        """Guesses [M, h] of the next final hidden states; row i reads the token after position i and the state at i."""
        dtype = next(self.layers.parameters()).dtype
        pair = torch.cat([self.embedding(token_ids).to(dtype), hidden.to(dtype)], dim=-1)
        states = self.fc(pair)[None]
        return _run_layers(self.layers, states, self.rotary(states, positions[None]), attention)[0]

    def recycled(self, states: Tensor) -> Tensor:
        """What the row of the next draft reads: the guess as it is."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Logits [b, D] of guesses [b, h]: no norm in between, the guess is of what the head reads."""
        logits: Tensor = self.head(states)
        return logits


class Eagle3Network(nn.Module):
    """EAGLE-3 (arXiv 2503.01840): several of the target's hidden states made one, beside the token after them.

    With a mask it is P-EAGLE's: rows of the mask stand for the tokens and states that are not known yet.
    Fill its weights, then set what may be the target's, before it is run.
    """

    embedding: nn.Module  # of target ids
    head: nn.Module

    def __init__(self, spec: Eagle3Spec, decoder: Any) -> None:
        """`decoder`: transformers' layers for `spec.decoder`. Raises Refusal if they are not served here."""
        super().__init__()
        width, eps, count = spec.decoder["hidden_size"], spec.decoder["rms_norm_eps"], len(spec.boundaries)
        if count:
            self.fc: nn.Module = nn.Linear(count * spec.target_hidden_size, width, bias=spec.has_fc_bias)
        else:
            self.fc = nn.Identity()
        if spec.norms_features:
            self.input_norm = nn.RMSNorm(count * spec.target_hidden_size, eps=eps)
        if spec.norms_each_feature:
            self.fc_norm = nn.ModuleList([nn.RMSNorm(spec.target_hidden_size, eps=eps) for _ in range(count)])
        if spec.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, max(count, 1) * spec.target_hidden_size))
        layers = _layers_of(decoder, spec.decoder)
        first = PairLayer(
            layers[0],
            spec.embedding_size,
            eps,
            has_hidden_norm=spec.has_hidden_norm,
            norm_before_residual=spec.norm_before_residual,
        )
        self.layers = nn.ModuleList([first, *layers[1:]])
        self.norm, self.rotary = decoder.norm, decoder.rotary_emb
        self._spec = spec

    def fuse(self, hidden: Tensor) -> Tensor:
        """Fuse the target's hidden states [M, A*H] into one state [M, h]. Drafted states skip it."""
        hidden = hidden.to(self.norm.weight.dtype)
        if self._spec.norms_features:
            hidden = self.input_norm(hidden)
        if self._spec.norms_each_feature:
            chunks = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        state: Tensor = self.fc(hidden)
        return state

    def forward(self, token_ids: Tensor, positions: Tensor, states: Tensor, attention: Mapping[str, Any]) -> Tensor:
        """New states [M, h], before the final norm; row i reads the token after position i and the state at i."""
        states = states[None]
        embedded = self.embedding(token_ids).to(states.dtype)[None]
        rotary = self.rotary(states, positions[None])
        states = self.layers[0](embedded, states, rotary, attention)
        return _run_layers(self.layers[1:], states, rotary, attention)[0]

    def masked_states(self, num_rows: int) -> Tensor:
        """The state [num_rows, h] of rows that hold nothing but the mask."""
        return self.fuse(self.mask_hidden[0]).expand(num_rows, -1)

    def recycled(self, states: Tensor) -> Tensor:
        """What the row of the next draft reads in the place of a fused state: [b, h] for [b, h]."""
        recycled: Tensor = self.norm(states) if self._spec.feeds_back_normed else states
        return recycled

    def logits(self, recycled: Tensor) -> Tensor:
        """Logits [..., D] of recycled states [..., h]."""
        logits: Tensor = self.head(recycled if self._spec.feeds_back_normed else self.norm(recycled))
        return logits


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


def _layers_of(decoder: Any, config: Mapping[str, Any]) -> nn.ModuleList:
    """A transformers decoder's layers. Raises Refusal if they are put together in another way than llama's.

    config: theirs. Latent attention has other projections.
    """
    layers: nn.ModuleList = decoder.layers
    if config.get("kv_lora_rank") is not None:
        _give_eps(layers, config)
        return layers
    for layer in decoder.layers:
        parts = {name for name, _ in layer.named_children()}
        attention = {name for name, _ in layer.self_attn.named_children()} if "self_attn" in parts else set()
        if parts != _LAYER_PARTS or not attention.issuperset(_PROJECTIONS):
            found = ", ".join(sorted(parts | attention))
            reason = f"its layers, of type {type(layer).__name__}, are made of {found}"
            raise Refusal(reason, "layers of the llama or qwen3 type")
    return layers


def _run_layers(
    layers: Iterable[nn.Module], states: Tensor, rotary: tuple[Tensor, Tensor], attention: Mapping[str, Any]
) -> Tensor:
    """Ordinary decoder layers on states [1, M, h]."""
    for layer in layers:
        states = layer(states, attention_mask=None, position_embeddings=rotary, **attention)
    return states


def _give_eps(layers: nn.ModuleList, config: Mapping[str, Any]) -> None:
    """Give the norms of latents the configured epsilon, as vLLM does; transformers has its own."""
    for layer in layers:
        for name, size in _NORMS.items():
            if config.get(size) is not None:
                setattr(layer.self_attn, name, nn.RMSNorm(config[size], eps=config["rms_norm_eps"]))
