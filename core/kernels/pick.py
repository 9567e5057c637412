"""Drawing a token from non-negative weights with one uniform: a two-level inverse CDF in index order.

Tile masses are summed in the weights' own precision and accumulated in float64; the chosen tile is accumulated
in float64. The fraction of the uniform that is left over by the choice of the tile chooses inside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128
LARGEST_UNIFORM = 1.0 - 2.0**-53


def empty_tiles(num_rows: int, vocab_size: int, like: Tensor) -> Tensor:
    """Uninitialised [num_rows, tiles, width] of `like`'s dtype and device, but zero beyond the vocabulary."""
    width = TILE if vocab_size > TILE else 1  # short rows need no second level
    num_tiles = -(-vocab_size // width)
    tiles = like.new_empty((num_rows, num_tiles, width))
    if num_tiles * width > vocab_size:
        tiles.flatten(1)[:, vocab_size:] = 0
    return tiles


def cumulate(weights: Tensor) -> Tensor:
    """Cumulative tile masses, float64 [R, tiles], of weights [R, tiles, width]; the last column is the row's mass."""
    return tile_masses(weights).cumsum(-1, dtype=torch.float64)


def tile_masses(weights: Tensor) -> Tensor:
    """The mass of each tile, [R, tiles], in the weights' precision."""
    return weights.squeeze(-1) if weights.shape[-1] == 1 else weights.sum(-1)


def pick(weights: Tensor, cdf: Tensor, uniforms: Tensor) -> Tensor:
    """The smallest token id whose cumulative weight exceeds uniform * mass, int64 [R].

    weights [R, tiles, width], cdf its `cumulate`, uniforms float64 [R] in [0, 1). The chosen weight is positive
    wherever the row's mass is.
    """
    num_tiles, width = weights.shape[1:]
    target = uniforms.clamp(max=LARGEST_UNIFORM).unsqueeze(1) * cdf[:, -1:]
    tile = torch.searchsorted(cdf, target, right=True).clamp_(max=num_tiles - 1)  # [R, 1]
    if width == 1:
        return tile.squeeze(1)
    below = torch.where(tile > 0, cdf.gather(1, (tile - 1).clamp_(min=0)), 0.0)
    fraction = ((target - below) / (cdf.gather(1, tile) - below)).clamp_(0.0, LARGEST_UNIFORM)
    chosen = weights.gather(1, tile.unsqueeze(2).expand(-1, -1, width)).squeeze(1)
    inner = chosen.cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(inner, fraction * inner[:, -1:], right=True).clamp_(max=width - 1)
    return (tile * width + index).squeeze(1)


def rows_where(wanted: Tensor) -> Tensor:
    """Indices that hold every wanted row: those alone on the host, all rows where counting would stall a device."""
    if wanted.device.type == "cpu":
        return wanted.nonzero().squeeze(1)
    return torch.arange(len(wanted), device=wanted.device)
