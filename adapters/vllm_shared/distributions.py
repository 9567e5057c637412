"""Draft distributions in the form that vLLM's verifiers take: probabilities over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.host import rejection, upload
from specdec.sdk.types import DistributionKind


def dense_rows(
    distributions: rejection.DraftDistributions, token_ids: Sequence[Sequence[int]], vocab_size: int
) -> Tensor:
    """q of every draft, one after the other: [sum of lengths, V] float32. Nothing waits for the device.

    distributions: of the requests that `token_ids` holds the drafts of, in the same order. One-hot drafts become
    one-hot rows. A negative id fills vLLM's step up and was not drawn: its row is 0.
    """
    places = [(request, place, token) for request, ids in enumerate(token_ids) for place, token in enumerate(ids)]
    lists = [list(column) for column in zip(*places, strict=True)]
    requests, within, tokens = upload(lists, distributions.kind.device)
    kinds = distributions.kind[requests]
    return _reported(distributions, requests, within, kinds, _one_hot(tokens, vocab_size))


def dense_slots(
    distributions: rejection.DraftDistributions | None, slots: Tensor, is_draft: Tensor, vocab_size: int
) -> Tensor:
    """q of every slot of [B, K] token ids, [B, K, V] float32, where what is no draft is certain of its token.

    distributions: of the same requests. None: every draft is one-hot.
    """
    q = _one_hot(slots.flatten(), vocab_size)
    if distributions is not None:
        requests, within = torch.meshgrid(*(torch.arange(n, device=q.device) for n in slots.shape), indexing="ij")
        kinds = distributions.kind[:, None].where(is_draft, int(DistributionKind.ONE_HOT))
        q = _reported(distributions, requests.flatten(), within.flatten(), kinds.flatten(), q)
    return q.view(*slots.shape, vocab_size)


def _one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    is_token = (tokens >= 0).float()
    q = torch.zeros(len(tokens), vocab_size, device=tokens.device)
    return q.scatter_(1, tokens.clamp(min=0)[:, None], is_token[:, None])


def _reported(
    distributions: rejection.DraftDistributions, requests: Tensor, within: Tensor, kinds: Tensor, q: Tensor
) -> Tensor:
    """Rows [N, V] of drafts (requests [N], within [N]) by the kind [N] of each: `q` for those that are one-hot.

    Rows of another kind are computed and not used: which kind a draft has, the host does not know.
    """
    probs, logits, t2d = distributions.draft_probs, distributions.draft_logits, distributions.t2d
    kinds = kinds[:, None]
    within = within.clamp(max=_width(distributions) - 1)
    if distributions.sparse_ids is not None and distributions.sparse_probs is not None:
        ids, sparse = distributions.sparse_ids[requests, within], distributions.sparse_probs[requests, within]
        reported = (kinds == DistributionKind.SPARSE) & (ids >= 0)  # elsewhere anything may stand
        rows = torch.zeros_like(q).scatter_add_(1, ids.where(reported, 0), sparse.where(reported, 0.0))
        q = rows.where(kinds == DistributionKind.SPARSE, q)
    if probs is not None:
        q = _over_target_ids(probs[requests, within], t2d).where(kinds == DistributionKind.DENSE_PROBS, q)
    if logits is not None:
        rows = _over_target_ids(logits[requests, within].softmax(dim=-1), t2d)
        q = rows.where(kinds == DistributionKind.DENSE_LOGITS, q)
    return q


def _width(distributions: rejection.DraftDistributions) -> int:
    """Places that the distributions were gathered of."""
    held = (distributions.draft_probs, distributions.draft_logits, distributions.sparse_ids)
    return next(each.shape[1] for each in held if each is not None)


def _over_target_ids(q: Tensor, t2d: Tensor | None) -> Tensor:
    """[N, V] of [N, Vd]."""
    return q if t2d is None else torch.where(t2d >= 0, q[:, t2d.clamp(min=0)], 0.0)
