"""Row statistics in plain torch; the kernel must agree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.core.kernels.cuda.row_stats import TileStats
from specdec.core.kernels.row_distribution import scale_of


def row_stats(logits: Tensor, cu_rows: Tensor, temperature: Tensor, stats: TileStats, skip_last: bool = False) -> None:
    """Fill stats for place i of request b with those of logits row cu_rows[b] + i.

    logits [R, V]; cu_rows int64 [B + 1]; temperature float32 [B]. Places without a row are left as they are, and
    with skip_last the last row of each request too.
    """
    scales = scale_of(temperature).float()
    for b, (first, end) in enumerate(zip(cu_rows[:-1].tolist(), cu_rows[1:].tolist(), strict=True)):
        num_rows = end - first - skip_last
        if num_rows > 0:
            fill_stats(logits[first : first + num_rows], scales[b], stats, b)


def draft_stats(logits: Tensor, lengths: Tensor, kinds: Tensor, kind: int, stats: TileStats) -> None:
    """Fill the statistics of draft logits [B, K, Vd] of unit temperature: lengths[b] rows of requests of this kind."""
    scale = scale_of(torch.ones(())).float()
    for b, (length, its_kind) in enumerate(zip(lengths.tolist(), kinds.tolist(), strict=True)):
        if its_kind == kind and length > 0:
            fill_stats(logits[b, :length], scale, stats, b)


def fill_stats(rows: Tensor, scale: Tensor, stats: TileStats, request: int) -> None:
    """Write the statistics of rows [n, V] at the first n places of a request."""
    num_tiles = stats.maxima.shape[2]
    tiles = pad(rows.float(), (0, num_tiles * stats.tile - rows.shape[1]), value=-torch.inf)
    tiles = tiles.view(len(rows), num_tiles, stats.tile)
    maxima = torch.where(tiles.isnan(), -torch.inf, tiles).amax(2)
    origin = torch.where(maxima == -torch.inf, 0.0, maxima)
    stats.maxima[request, : len(rows)] = maxima
    stats.sums[request, : len(rows)] = ((tiles - origin.unsqueeze(2)) * scale).exp2().sum(2)
