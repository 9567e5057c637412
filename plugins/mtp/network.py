"""A multi-token-prediction module (arXiv 2412.19437): one layer of the target's kind on token and state.

Letters: M rows of all requests, b requests, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk import Refusal

from .checkpoint import MtpSpec


class MtpModule(nn.Module):
    """Norms, projection and layer. Fill its weights, then set what may be the target's, before it is run.

    The embedding of position 0's row is not zeroed, as in training and in transformers; some engines zero it.
    """

    embedding: nn.Module  # of target ids
    head: nn.Module

    def __init__(self, spec: MtpSpec, decoder: Any, depth: int = 0) -> None:
        """`decoder`: transformers' layers for `spec.decoder`, a module's at its `depth`.

        Raises Refusal if it is put together unusually.
        """
        super().__init__()
        try:
            layers, norm, self.rotary = decoder.layers, decoder.norm, decoder.rotary_emb
        except AttributeError as error:
            raise Refusal(f"layers of type {spec.decoder['model_type']!r} are not served here: {error}") from error
        self.embedding_norm, self.hidden_norm = deepcopy(norm), deepcopy(norm)  # the family's own class of norm
        self.projection = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=spec.has_bias)
        self.layer = layers[depth]
        self.final_norm = deepcopy(norm) if "final_norm" in spec.layout.parts else nn.Identity()
        self._hidden_first = spec.layout.hidden_first
        self._recycles_normed = spec.recycled == "normed"

    def forward(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, attention: Mapping[str, Any]) -> Tensor:
        """The block's output [M, H]: row i reads the token after position i and the hidden state at i."""
        dtype = next(self.hidden_norm.parameters()).dtype
        embedded = self.embedding_norm(self.embedding(token_ids).to(dtype))
        pair = [embedded, self.hidden_norm(hidden.to(dtype))]
        states = self.projection(torch.cat(pair[::-1] if self._hidden_first else pair, dim=-1))[None]
        output = self.layer(
            states,
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=self.rotary(states, positions[None]),
            **attention,
        )
        block: Tensor = output if isinstance(output, Tensor) else output[0]
        return block[0]

    def recycled(self, block: Tensor) -> Tensor:
        """What the next step reads in the place of the target's hidden state: [b, H] for [b, H]."""
        states: Tensor = self.final_norm(block) if self._recycles_normed else block
        return states

    def logits(self, recycled: Tensor) -> Tensor:
        """Logits [b, V] of recycled states [b, H]."""
        logits: Tensor = self.head(recycled if self._recycles_normed else self.final_norm(recycled))
        return logits
