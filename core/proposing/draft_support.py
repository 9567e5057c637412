"""Which drafted tokens their reported distribution can draw: of each distribution one entry is looked at, never all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sdk.types import DistributionKind, DraftDistribution


def target_to_draft(vocabulary: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """The draft id of each target id, -1 where it has none: [V] int64. `vocabulary` [Vd]: target ids by draft id."""
    t2d = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
    t2d[torch.tensor(vocabulary, device=device)] = torch.arange(len(vocabulary), device=device)
    return t2d


def can_draw(
    kind: int, distribution: DraftDistribution, token_ids: Tensor, t2d: Tensor | None, vocab_size: int
) -> Tensor:
    """Whether each token can come from its distribution, read as this kind in every row: [B, K] bool.

    Probabilities have to be above 0, logits finite, and every id of a sparse distribution within -1 .. V - 1.
    `t2d` is None where draft ids are target ids. Padding gives any answer. Nothing waits for a device.
    """
    match kind:
        case DistributionKind.DENSE_PROBS if distribution.probs is not None:
            return _entries(distribution.probs, token_ids, t2d) > 0
        case DistributionKind.DENSE_LOGITS if distribution.logits is not None:
            return _entries(distribution.logits, token_ids, t2d).isfinite()
        case DistributionKind.SPARSE if distribution.sparse_ids is not None and distribution.sparse_probs is not None:
            drawn = (distribution.sparse_ids == token_ids[..., None]) & (distribution.sparse_probs > 0)
            inside = (distribution.sparse_ids >= -1) & (distribution.sparse_ids < vocab_size)
            return drawn.any(-1) & inside.all(-1)
    return torch.ones_like(token_ids, dtype=torch.bool)


def _entries(table: Tensor, token_ids: Tensor, t2d: Tensor | None) -> Tensor:
    """The entries [B, K] of a table [B, K, Vd] at target ids, NaN for those outside the draft vocabulary."""
    width = table.shape[2] if t2d is None else len(t2d)
    known = token_ids.long().clamp(0, width - 1)
    if t2d is None:
        return table.gather(2, known[..., None])[..., 0]
    draft_ids = t2d[known]
    return table.gather(2, draft_ids.clamp(min=0)[..., None])[..., 0].masked_fill(draft_ids < 0, torch.nan)
