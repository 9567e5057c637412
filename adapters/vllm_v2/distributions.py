"""Draft distributions as logits by row, which vLLM's V2 verifier divides by the request's temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_TEMPERATURE = 1e-6
"""Of a greedy request, whose drafts are compared with the most likely token instead."""


def put_logits(
    logits: Tensor, rows: Tensor, drafts: Sequence[list[int]], slots: Tensor, q: Tensor | None, temperature: Tensor
) -> None:
    """Write log q * temperature of each slot, in place.

    logits: [rows, K, V]. rows, temperature: [B]. slots: [B, K] token ids; those beyond a draft are certain of theirs.
    q: of every draft, one after the other [sum of lengths, V]; None: all are one-hot.
    """
    dense = torch.zeros(*slots.shape, logits.shape[-1], device=logits.device)
    dense.scatter_(2, slots.to(logits.device)[:, :, None], 1.0)
    if q is not None:
        lengths = torch.tensor([len(draft) for draft in drafts])[:, None]
        dense[(torch.arange(slots.shape[1]) < lengths).to(logits.device)] = q
    logits[rows] = dense.log() * temperature.clamp(min=LEAST_TEMPERATURE)[:, None, None]
