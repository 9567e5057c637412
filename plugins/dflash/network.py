"""The DFlash network (arXiv 2602.06036): a block of mask tokens filled in at once, over the target's hidden states.

Letters: N context rows, b requests, W slots of a block, L layers, A hidden states of the target of width H each,
h the network's own width, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk import Refusal
from specdec.sdk.model_proposer import rotate

from .checkpoint import DFlashSpec
from .convolution import convolve
from .walk import Walk

_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


class DFlashNetwork(nn.Module):
    """Draft layers over a context that holds the target's hidden states only.

    Fill its weights, then `attach` what may be the target's, before it is run.
    """

    embedding: nn.Module
    head: nn.Module
    mask: nn.Parameter  # [h], what every slot but the anchor's starts from
    walk: Walk

    def __init__(self, spec: DFlashSpec, decoder: Any, num_slots: int) -> None:
        """`decoder`: transformers' layers for `spec.decoder`. Raises Refusal if their attention is of another make.

        num_slots: W of every block.
        """
        super().__init__()
        self.fc = nn.Linear(len(spec.boundaries) * spec.target_hidden_size, spec.width, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.width, eps=spec.decoder["rms_norm_eps"])
        self.layers, self.norm, self.rotary = decoder.layers, decoder.norm, decoder.rotary_emb
        self._head_dim: int = spec.decoder["head_dim"]
        self._first_slot = spec.first_drafting_slot
        self._embedding_scale = spec.embedding_scale
        self._logit_multiplier, self._logit_cap = spec.logit_multiplier, spec.logit_cap
        parts = {name for name, _ in self.layers[0].self_attn.named_children()}
        if parts != _ATTENTION_PARTS:
            found = ", ".join(sorted(parts))
            reason = f"its layers are of type {spec.decoder['model_type']!r}, whose attention is made of {found}"
            raise Refusal(reason, f"layers whose attention is made of {', '.join(sorted(_ATTENTION_PARTS))}")
        self._attention = [layer.self_attn for layer in self.layers]
        if spec.convolution is not None:
            for layer in self.layers:
                spec.convolution.add_to(layer, num_slots)

    def attach(self, embedding: nn.Module, head: nn.Module, mask: Tensor, walk: Walk) -> None:
        """Embedding of target ids, output head, the mask token's embedding [h], and how tokens are drawn."""
        self.embedding, self.head, self.walk = embedding, head, walk
        self.mask = nn.Parameter(mask, requires_grad=False)
        for layer in self.layers:
            convolve(layer)

    def project(self, hidden: Tensor) -> Tensor:
        """Context rows [N, h] of hidden states [N, A*H]."""
        rows: Tensor = self.hidden_norm(self.fc(hidden.to(self.mask.dtype)))
        return rows

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., h] of target ids."""
        rows: Tensor = self.embedding(token_ids)
        return (rows if self._embedding_scale == 1 else rows * self._embedding_scale).to(self.mask.dtype)

    def context(self, hidden: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [N, heads, head_dim] of each layer for hidden states [N, A*H] at positions [N].

        Every layer reads the same rows, without a norm of its own.
        """
        rows = self.project(hidden)
        rotary = self.rotary(rows[None], positions[None])
        for attention in self._attention:
            keys = attention.k_norm(attention.k_proj(rows).unflatten(-1, (-1, self._head_dim)))
            yield rotate(keys, rotary), attention.v_proj(rows).unflatten(-1, (-1, self._head_dim))

    def forward(
        self, anchors: Tensor, positions: Tensor, attention: Sequence[Mapping[str, Any]]
    ) -> tuple[Tensor, Tensor]:
        """Outputs [b, W, h] of slots at positions [b, W], and the logits of those that draft: [b, W, D] or [b, W-1, D].

        anchors: the newest tokens [b].
        attention: what each layer's attention takes, [L].
        """
        masks = self.mask.expand(anchors.shape[0], positions.shape[1] - 1, -1)
        slots = torch.cat([self.embed(anchors)[:, None], masks], dim=1)
        states = slots.flatten(0, 1)[None]
        rotary = self.rotary(states, positions.flatten()[None])
        for layer, keywords in zip(self.layers, attention, strict=True):
            states = layer(states, attention_mask=None, position_embeddings=rotary, **keywords)
        outputs = self.norm(states).view_as(slots)
        return outputs, self._capped(self.head(outputs[:, self._first_slot :]))

    def _capped(self, logits: Tensor) -> Tensor:
        if self._logit_multiplier != 1:
            logits = logits * self._logit_multiplier
        return logits if self._logit_cap is None else self._logit_cap * torch.tanh(logits / self._logit_cap)
