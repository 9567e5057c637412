"""The EAGLE networks. Letters: M rows of all requests, h the network's width, E the embedding's, H the target's,
A hidden states of the target, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .eagle3_spec import Eagle3Spec
from .eagle_spec import EagleSpec
from .layers import PairLayer, layers_of, run_layers


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
        self.layers, self.rotary = layers_of(decoder, spec.decoder), decoder.rotary_emb
        self.layers[0].input_layernorm = nn.Identity()

    def forward(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, attention: Mapping[str, Any]) -> Tensor:
        """Guesses [M, h] of the next final hidden states; row i reads the token after position i and the state at i."""
        dtype = next(self.layers.parameters()).dtype
        pair = torch.cat([self.embedding(token_ids).to(dtype), hidden.to(dtype)], dim=-1)
        states = self.fc(pair)[None]
        return run_layers(self.layers, states, self.rotary(states, positions[None]), attention)[0]

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
        layers = layers_of(decoder, spec.decoder)
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
        return run_layers(self.layers[1:], states, rotary, attention)[0]

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
