"""Row filters in plain torch; the kernel must agree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.core.kernels.cuda.row_stats import TileStats
from specdec.core.kernels.filters import FilterRows, apply_filters
from specdec.core.kernels.row_distribution import scale_of


def filter_rows(
    logits: Tensor, cu_rows: Tensor, temperature: Tensor, filters: FilterRows, stats: TileStats, cutoff: Tensor
) -> None:
    """Set the cutoff [B, places] of every row, and the tile sums of filtered rows to those of the survivors.

    A token survives if its logit is at least the cutoff. stats is what `row_stats` left; filters hold one value per
    request. A greedy row and a bad row keep their sums, with cutoff -inf: their token is their maximum.
    """
    scales = scale_of(temperature).float()
    for b, (first, end) in enumerate(zip(cu_rows[:-1].tolist(), cu_rows[1:].tolist(), strict=True)):
        of_request = FilterRows(filters.top_k[b, None], filters.top_p[b, None], filters.min_p[b, None])
        for i in range(end - first):
            row = logits[first + i : first + i + 1].float()
            top = row.amax(1, keepdim=True)
            cutoff[b, i] = -torch.inf
            if temperature[b] > 0 and top.isfinite():
                weights = ((row - top) * scales[b]).exp2_().unsqueeze(2)
                cutoff[b, i] = apply_filters(row, top, scales[b].view(1, 1), of_request, weights)
                stats.sums[b, i] = survivor_sums(row[0], scales[b], cutoff[b, i], stats.maxima[b, i], stats.tile)


def survivor_sums(row: Tensor, scale: Tensor, cutoff: Tensor, maxima: Tensor, width: int) -> Tensor:
    """What the tokens at or above the cutoff add to each tile's sum."""
    tiles = pad(row, (0, len(maxima) * width - len(row)), value=-torch.inf).view(len(maxima), width)
    weights = ((tiles - maxima.unsqueeze(1)) * scale).exp2()
    return torch.where((tiles >= cutoff) & (tiles > -torch.inf), weights, 0.0).sum(1)
