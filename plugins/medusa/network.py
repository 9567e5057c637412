"""The Medusa heads (arXiv 2401.10774). Letters: b requests, k heads in use, H hidden size, D draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .checkpoint import MedusaSpec


class MedusaHeads(nn.Module):
    """Residual layers and an output head for every draft position. Fill the weights, then set a shared head."""

    def __init__(self, spec: MedusaSpec, num_heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ResidualLayers(spec) for _ in range(num_heads)])
        num_own = num_heads if spec.has_own_heads else 0
        outputs = [nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False) for _ in range(num_own)]
        self.lm_heads = nn.ModuleList(outputs)
        self._logit_scale = spec.logit_scale
        self.shared: nn.Module | None = None  # the output head of all

    def forward(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """Logits [b, num_tokens, D] of the tokens after the newest, from the target's final hidden states [b, H]."""
        states = [block(hidden) for block in self.blocks[:num_tokens]]
        if self.shared is not None:
            logits: Tensor = self.shared(torch.stack(states, dim=1))
            return logits
        own = torch.stack([head(state) for head, state in zip(self.lm_heads, states, strict=False)], dim=1)
        return own if self._logit_scale == 1 else own * self._logit_scale


class ResidualLayers(nn.Module):
    """y + SiLU(linear(y)), repeated."""

    def __init__(self, spec: MedusaSpec) -> None:
        super().__init__()
        width = spec.hidden_size
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=spec.has_bias) for _ in range(spec.num_layers)])

    def forward(self, states: Tensor) -> Tensor:
        """States of the same shape [b, H]."""
        for layer in self.layers:
            states = states + silu(layer(states))
        return states
