"""Draft distributions as logits by row, which vLLM's V2 verifier divides by the request's temperature."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_TEMPERATURE = 1e-6
"""Of a greedy request, whose drafts are compared with the most likely token instead."""


def put_logits(logits: Tensor, rows: Tensor, q: Tensor, temperature: Tensor) -> None:
    """Write log q * temperature, in place. logits: [rows, K, V]. rows, temperature: [B]. q: [B, K, V]."""
    logits[rows] = q.log() * temperature.clamp(min=LEAST_TEMPERATURE)[:, None, None]


def put_certain(logits: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write, in place, that each slot is certain of its token. logits: [rows, K, V]. rows: [B]. slots: [B, K]."""
    logits.index_fill_(0, rows, -torch.inf)
    logits[rows[:, None], torch.arange(slots.shape[1], device=slots.device), slots] = 0.0
