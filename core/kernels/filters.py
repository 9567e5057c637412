"""Min-p, top-k and top-p as one cutoff per row: a token survives if its logit reaches it, so ties are kept.

The order is part of the contract, because the filters do not commute: min-p on the row's maximum, top-k, then
top-p on the renormalised survivors of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .pick import cumulate, rows_where

CANDIDATE_COUNTS = (64, 512, 4096)
SLICES = 64  # a column of as many tokens, spread over the row, is looked at only if its maximum is large


@dataclass(frozen=True)
class FilterRows:
    """Filters per logits row."""

    top_k: Tensor  # [R] int64; 0: off
    top_p: Tensor  # [R] float32; 1: off
    min_p: Tensor  # [R] float32; 0: off

    def part(self, rows: slice) -> FilterRows:
        """The filters of some rows."""
        return FilterRows(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def apply_filters(logits: Tensor, maxima: Tensor, scale: Tensor, filters: FilterRows, weights: Tensor) -> Tensor:
    """The cutoff of each row [R, 1], -inf where nothing is filtered, never above the row's maximum.

    logits [R, V] without NaN, maxima and scale [R, 1]; weights [R, tiles, width] are exp2((logit - maximum) * scale),
    and are set to 0 below the cutoff.
    """
    vocab_size = logits.shape[1]
    min_p = filters.min_p.to(scale.dtype).unsqueeze(1)
    cutoff = maxima + min_p.log2() / scale
    rows = rows_where((filters.top_k > 0) & (filters.top_k < vocab_size))
    if rows.numel():
        kth = _kth_largest(_rows(logits, rows), filters.top_k[rows])
        cutoff[rows] = torch.maximum(cutoff[rows], kth)
    cutoff = torch.minimum(cutoff, maxima)
    drop_below(cutoff, logits, weights)
    rows = rows_where(filters.top_p < 1)
    if not rows.numel():
        return cutoff
    wanted = filters.top_p[rows].double().unsqueeze(1) * cumulate(_rows(weights, rows))[:, -1:]
    edge = _nucleus_edge(_rows(logits, rows), maxima[rows], scale[rows], cutoff[rows], wanted)
    edge = torch.where((filters.top_p[rows] < 1).unsqueeze(1), edge, -torch.inf)
    cutoff[rows] = torch.maximum(cutoff[rows], edge)
    drop_below(cutoff, logits, weights)
    return cutoff


def drop_below(cutoff: Tensor, logits: Tensor, weights: Tensor) -> None:
    """Set the weights [R, tiles, width] of logits [R, V] below the cutoff [R, 1] to 0; a product is the fastest way."""
    flat = weights.flatten(1)[:, : logits.shape[1]]
    flat.mul_(torch.ge(logits, cutoff, out=torch.empty_like(flat)))


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    """The given rows, which are not copied where they are all."""
    return values if len(rows) == len(values) else values[rows]


def largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row [R, V], descending.

    They lie in the `count` columns, of `SLICES` values each, with the largest maxima.
    """
    size = values.shape[1]
    columns = size // SLICES
    if columns < 4 * count:
        return values.sort(-1, descending=True).values[:, :count] if 2 * count >= size else values.topk(count).values
    slices = values[:, : SLICES * columns].view(-1, SLICES, columns)
    best = slices.amax(1).topk(count).indices
    candidates = slices.gather(2, best.unsqueeze(1).expand(-1, SLICES, -1)).flatten(1)
    return torch.cat((candidates, values[:, SLICES * columns :]), 1).topk(count).values


def _kth_largest(logits: Tensor, top_k: Tensor) -> Tensor:
    vocab_size = logits.shape[1]
    active = (top_k > 0) & (top_k < vocab_size)
    count = int(top_k.max()) if logits.device.type == "cpu" else vocab_size
    last = torch.where(active, top_k - 1, 0).unsqueeze(1)
    return torch.where(active.unsqueeze(1), largest(logits, count).gather(1, last), -torch.inf)


def _nucleus_edge(logits: Tensor, maxima: Tensor, scale: Tensor, cutoff: Tensor, wanted: Tensor) -> Tensor:
    """The largest logit such that the survivors which reach it hold at least the wanted mass [R, 1] float64."""
    vocab_size = logits.shape[1]
    edge = torch.full_like(cutoff, -torch.inf)
    rows = torch.arange(len(logits), device=logits.device)
    for count in (*CANDIDATE_COUNTS, vocab_size) if logits.device.type == "cpu" else (vocab_size,):
        candidates = largest(_rows(logits, rows), min(count, vocab_size))
        weights = ((candidates - maxima[rows]) * scale[rows]).exp2_().masked_fill_(candidates < cutoff[rows], 0.0)
        masses = weights.cumsum(-1, dtype=torch.float64)
        last = torch.searchsorted(masses, wanted[rows]).clamp_(max=candidates.shape[1] - 1)
        edge[rows] = candidates.gather(1, last)
        if count < vocab_size:
            rows = rows[((masses[:, -1:] < wanted[rows]) & (candidates[:, -1:] >= cutoff[rows])).squeeze(1)]
        if count >= vocab_size or not rows.numel():
            break
    return edge
