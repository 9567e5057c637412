"""Draft distributions in the form that vLLM's verifier takes: probabilities over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.host import rejection
from specdec.sdk.types import DistributionKind


def dense_rows(
    distributions: rejection.DraftDistributions, token_ids: Sequence[Sequence[int]], vocab_size: int
) -> Tensor:
    """q of every draft, one after the other: [sum of lengths, V] float32.

    distributions: of the requests that `token_ids` holds the drafts of, in the same order. One-hot drafts become
    one-hot rows.
    """
    rows = [
        _row_of(distributions, request, position, token_id, vocab_size)
        for request, ids in enumerate(token_ids)
        for position, token_id in enumerate(ids)
    ]
    return torch.stack(rows)


def _row_of(
    distributions: rejection.DraftDistributions, request: int, position: int, token_id: int, vocab_size: int
) -> Tensor:
    kind = DistributionKind(int(distributions.kind[request]))
    q = torch.zeros(vocab_size, device=distributions.kind.device)
    if (
        kind is DistributionKind.SPARSE
        and distributions.sparse_ids is not None
        and distributions.sparse_probs is not None
    ):
        ids = distributions.sparse_ids[request, position]
        return q.index_add_(0, ids.clamp(min=0), distributions.sparse_probs[request, position] * (ids >= 0))
    if kind is DistributionKind.DENSE_PROBS and distributions.draft_probs is not None:
        return _over_target_ids(distributions.draft_probs[request, position], distributions.t2d)
    if kind is DistributionKind.DENSE_LOGITS and distributions.draft_logits is not None:
        return _over_target_ids(distributions.draft_logits[request, position].softmax(dim=-1), distributions.t2d)
    q[token_id] = 1
    return q


def _over_target_ids(q: Tensor, t2d: Tensor | None) -> Tensor:
    return q if t2d is None else torch.where(t2d >= 0, q[t2d.clamp(min=0)], 0.0)
