"""Min-p, top-k and top-p as one cutoff per row: a token survives if its logit reaches it, so ties are kept.

The order is part of the contract, because the filters do not commute: min-p on the row's maximum, top-k, then
top-p on the renormalised survivors of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .pick import cumulate, empty_tiles, rows_where

CANDIDATE_COUNTS = (64, 512, 4096)


@dataclass(frozen=True)
class FilterRows:
    """Filters per logits row."""

    top_k: Tensor  # [R] int64; 0: off
    top_p: Tensor  # [R] float32; 1: off
    min_p: Tensor  # [R] float32; 0: off


def cutoffs(logits: Tensor, maxima: Tensor, scale: Tensor, filters: FilterRows) -> Tensor:
    """The cutoff of each row [R, 1], -inf where nothing is filtered, never above the row's maximum.

    logits [R, V] without NaN, maxima and scale [R, 1] (a weight is exp2((logit - maximum) * scale)).
    """
    min_p = filters.min_p.to(scale.dtype).unsqueeze(1)
    cutoff = maxima + min_p.log2() / scale
    vocab_size = logits.shape[1]
    rows = rows_where((filters.top_k > 0) & (filters.top_k < vocab_size))
    if rows.numel():
        kth = _kth_largest(logits[rows], filters.top_k[rows])
        cutoff[rows] = torch.maximum(cutoff[rows], kth)
    rows = rows_where(filters.top_p < 1)
    if rows.numel():
        nucleus = _nucleus_edge(logits[rows], maxima[rows], scale[rows], cutoff[rows], filters.top_p[rows])
        cutoff[rows] = torch.maximum(cutoff[rows], nucleus)
    return torch.minimum(cutoff, maxima)


def _largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, descending."""
    if 2 * count >= values.shape[1]:
        return values.sort(-1, descending=True).values[:, :count]
    return values.topk(count).values


def _kth_largest(logits: Tensor, top_k: Tensor) -> Tensor:
    vocab_size = logits.shape[1]
    active = (top_k > 0) & (top_k < vocab_size)
    count = int(top_k.max()) if logits.device.type == "cpu" else vocab_size
    last = torch.where(active, top_k - 1, 0).unsqueeze(1)
    return torch.where(active.unsqueeze(1), _largest(logits, count).gather(1, last), -torch.inf)


def _nucleus_edge(logits: Tensor, maxima: Tensor, scale: Tensor, cutoff: Tensor, top_p: Tensor) -> Tensor:
    """The largest logit such that the survivors which reach it hold at least top_p of the survivors' mass."""
    vocab_size = logits.shape[1]
    weights = empty_tiles(len(logits), vocab_size, maxima)
    weights.flatten(1)[:, :vocab_size] = _weigh(logits, maxima, scale, cutoff)
    wanted = top_p.double().unsqueeze(1) * cumulate(weights)[:, -1:]
    edge = torch.full_like(cutoff, -torch.inf)
    rows = torch.arange(len(logits), device=logits.device)
    for count in (*CANDIDATE_COUNTS, vocab_size) if logits.device.type == "cpu" else (vocab_size,):
        candidates = _largest(logits[rows], min(count, vocab_size))
        masses = _weigh(candidates, maxima[rows], scale[rows], cutoff[rows]).cumsum(-1, dtype=torch.float64)
        last = torch.searchsorted(masses, wanted[rows]).clamp_(max=candidates.shape[1] - 1)
        edge[rows] = candidates.gather(1, last)
        if count < vocab_size:
            rows = rows[(masses[:, -1:] < wanted[rows]).squeeze(1)]
        if count >= vocab_size or not rows.numel():
            break
    return torch.where((top_p < 1).unsqueeze(1), edge, -torch.inf)


def _weigh(logits: Tensor, maxima: Tensor, scale: Tensor, cutoff: Tensor) -> Tensor:
    return ((logits - maxima) * scale).exp2_().masked_fill_(logits < cutoff, 0.0)
