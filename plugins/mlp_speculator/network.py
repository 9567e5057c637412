"""The stages of an MLP speculator (arXiv 2404.19124). Letters: b requests, H hidden size, h width, V vocabulary."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from .checkpoint import MlpSpec

_EPS = 1e-6


class ShiftedNorm(nn.Module):
    """A norm by the root of the mean square, with a weight and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, states: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return self.weight * _normed(states) + self.bias


class MlpSpeculator(nn.Module):
    """Stages in a row. Each mixes the state before it with the newest token, and has a head of its own."""

    def __init__(self, spec: MlpSpec, num_stages: int) -> None:
        super().__init__()
        count = {part: min(stored, num_stages) for part, stored in spec.stored.items()}
        widths = [spec.hidden_size] + [spec.width] * (count["proj"] - 1)
        self.emb = nn.ModuleList([nn.Embedding(spec.vocab_size, spec.width) for _ in range(count["emb"])])
        self.proj = nn.ModuleList([nn.Linear(width, spec.width, bias=False) for width in widths])
        self.ln = nn.ModuleList([ShiftedNorm(spec.width) for _ in range(count["ln"])])
        self.head = nn.ModuleList([nn.Linear(spec.width, spec.vocab_size, bias=False) for _ in range(count["head"])])
        self._scales_input = spec.scales_input
        kept = 0.5 ** (0.5 / spec.num_stages)  # of the state before, so that half its variance is left at the end
        self._token_weight = sqrt((1 - kept**2) * spec.width / 2) / kept

    def start(self, final: Tensor) -> Tensor:
        """The state [b, H] before the first stage, of the target's final hidden states [b, H]."""
        states = final.to(next(self.ln.parameters()).dtype)
        return _normed(states) / sqrt(2) if self._scales_input else states

    def forward(self, stage: int, states: Tensor, token_ids: Tensor) -> Tensor:
        """The state [b, h] behind a stage, of the one before it [b, H or h] and the newest token [b]."""
        embedded = _at(self.emb, stage)(token_ids)
        return gelu(_at(self.ln, stage)(_at(self.proj, stage)(states) + self._token_weight * embedded))

    def logits(self, stage: int, states: Tensor) -> Tensor:
        """[b, V] of the states [b, h] behind a stage."""
        logits: Tensor = _at(self.head, stage)(states)
        return logits


def _at(parts: nn.ModuleList, stage: int) -> nn.Module:
    """A stage's part; the last one is that of all stages behind it."""
    return parts[min(stage, len(parts) - 1)]


def _normed(states: Tensor) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + _EPS)
