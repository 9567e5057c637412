"""Draft laws in the form that vLLM's verifier takes: probabilities over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.rejection.types import DraftLaws
from specdec.sdk.types import LawKind


def dense_rows(laws: DraftLaws, token_ids: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """q of every draft, one after the other: [sum of lengths, V] float32.

    laws: of the requests that `token_ids` holds the drafts of, in the same order. One-hot drafts become one-hot rows.
    """
    rows = [
        _row_of(laws, request, position, token_id, vocab_size)
        for request, ids in enumerate(token_ids)
        for position, token_id in enumerate(ids)
    ]
    return torch.stack(rows)


def _row_of(laws: DraftLaws, request: int, position: int, token_id: int, vocab_size: int) -> Tensor:
    kind = LawKind(int(laws.kind[request]))
    q = torch.zeros(vocab_size, device=laws.kind.device)
    if kind is LawKind.SPARSE and laws.sparse_ids is not None and laws.sparse_probs is not None:
        ids = laws.sparse_ids[request, position]
        return q.index_add_(0, ids.clamp(min=0), laws.sparse_probs[request, position] * (ids >= 0))
    if kind is LawKind.DENSE_PROBS and laws.probs is not None:
        return _over_target_ids(laws.probs[request, position], laws.t2d)
    if kind is LawKind.DENSE_LOGITS and laws.logits is not None:
        return _over_target_ids(laws.logits[request, position].softmax(dim=-1), laws.t2d)
    q[token_id] = 1
    return q


def _over_target_ids(q: Tensor, t2d: Tensor | None) -> Tensor:
    return q if t2d is None else torch.where(t2d >= 0, q[t2d.clamp(min=0)], 0.0)
