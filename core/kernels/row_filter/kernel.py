"""Row filters as one Triton kernel, one program per row.

Both top-k and top-p ask for the largest logit such that those at or above it are k in number, or hold a share of
the mass. A float's bits, suitably flipped, order like the float, so the search halves twice per pass over integers
and ends at an exact logit. A pass reads only tiles whose maximum reaches the lowest value still possible.
"""

# ruff: noqa: ANN001, ANN201, PLR0913, RUF059
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..filters import FilterRows
from ..launch import PER_ROW, next_power_of_two
from ..row_stats import TileStats
from ..row_tiles import MINUS_INF, load_stats, load_tile, row_scale


@triton.jit
def key_of(value):
    """int64 that orders as the fp32 value does."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def amounts_above(
    row_ptr,
    maxima_ptr,
    top,
    scale,
    cutoff,
    low,
    middle,
    high,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    MASS: tl.constexpr,
):
    """Mass (of what reaches the cutoff) or number of the logits at or above each of three rising pivots; fp64."""
    above_low = tl.full([], 0.0, tl.float64)
    above_middle = tl.full([], 0.0, tl.float64)
    above_high = tl.full([], 0.0, tl.float64)
    for tile in range(num_tiles):
        if tl.load(maxima_ptr + tile) >= low:
            values = load_tile(row_ptr, tile, vocab_size, TILE)
            if MASS:
                amounts = tl.where(values >= cutoff, tl.exp2((values - top) * scale), 0.0)
            else:
                amounts = tl.where(values > MINUS_INF, 1.0, 0.0)
            above_low += tl.sum(tl.where(values >= low, amounts, 0.0), 0).to(tl.float64)
            above_middle += tl.sum(tl.where(values >= middle, amounts, 0.0), 0).to(tl.float64)
            above_high += tl.sum(tl.where(values >= high, amounts, 0.0), 0).to(tl.float64)
    return above_low, above_middle, above_high


@triton.jit
def largest_reaching(
    row_ptr,
    maxima_ptr,
    top,
    scale,
    cutoff,
    floor,
    wanted,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    MASS: tl.constexpr,
):
    """The largest value v >= floor such that the amount at or above v is at least wanted; floor must satisfy it."""
    least = key_of(floor)
    beyond = key_of(top) + 1
    while beyond - least > 1:
        step = tl.maximum((beyond - least) // 4, 1)
        first = least + step
        second = tl.minimum(first + step, beyond - 1)
        third = tl.minimum(second + step, beyond - 1)
        above_first, above_second, above_third = amounts_above(
            row_ptr, maxima_ptr, top, scale, cutoff, value_of(first), value_of(second), value_of(third),
            vocab_size, num_tiles, TILE, MASS,
        )  # fmt: skip
        if above_third >= wanted:
            least = third
        elif above_second >= wanted:
            least = second
            beyond = third
        elif above_first >= wanted:
            least = first
            beyond = second
        else:
            beyond = first
    return value_of(least)


@triton.jit
def kth_tile_maximum(maxima, k, TILES: tl.constexpr):
    """The k-th largest tile maximum: at least k logits reach it. -inf where there are fewer tiles."""
    descending = tl.sort(maxima, descending=True)
    return tl.max(tl.where(tl.arange(0, TILES) == k - 1, descending, MINUS_INF), 0)


@triton.jit
def filter_rows_kernel(
    logits_ptr,
    row_stride,
    cu_rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    sums_ptr,
    cutoff_ptr,
    vocab_size,
    num_places,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid [places, B]."""
    request = tl.program_id(1)
    place = request.to(tl.int64) * num_places + tl.program_id(0)
    row = tl.load(cu_rows_ptr + request) + tl.program_id(0)
    if row >= tl.load(cu_rows_ptr + request + 1):
        return
    temperature = tl.load(temperature_ptr + request)
    scale = row_scale(temperature)
    maxima_ptr += place * num_tiles
    sums_ptr += place * num_tiles
    row_ptr = logits_ptr + row * row_stride
    maxima, masses, top, mass, bad = load_stats(maxima_ptr, sums_ptr, scale, num_tiles, TILES)
    top_k = tl.load(top_k_ptr + request)
    top_p = tl.load(top_p_ptr + request)
    min_p = tl.load(min_p_ptr + request)
    some_k = (top_k > 0) & (top_k < vocab_size)
    cutoff = tl.full([], MINUS_INF, tl.float32)
    if ((temperature > 0) & (bad == 0)) & (some_k | (top_p < 1) | (min_p > 0)):
        if min_p > 0:
            cutoff = top + tl.log2(min_p) / scale
        if some_k:
            floor = kth_tile_maximum(maxima, top_k, TILES)
            kth = largest_reaching(
                row_ptr, maxima_ptr, top, scale, cutoff, floor, top_k.to(tl.float64), vocab_size, num_tiles, TILE, False
            )
            cutoff = tl.maximum(cutoff, kth)
        if top_p < 1:
            if some_k | (min_p > 0):
                mass, above_top, above_it = amounts_above(
                    row_ptr, maxima_ptr, top, scale, cutoff, cutoff, top, top, vocab_size, num_tiles, TILE, True
                )
            floor = tl.maximum(cutoff, top - 150.0 / scale)
            edge = largest_reaching(
                row_ptr, maxima_ptr, top, scale, cutoff, floor, top_p.to(tl.float64) * mass, vocab_size, num_tiles,
                TILE, True,
            )  # fmt: skip
            cutoff = tl.maximum(cutoff, edge)
        cutoff = tl.minimum(cutoff, top)
        for tile in range(num_tiles):
            tile_top = tl.load(maxima_ptr + tile)
            kept = tl.full([], 0.0, tl.float32)
            if tile_top >= cutoff:
                values = load_tile(row_ptr, tile, vocab_size, TILE)
                origin = tl.where(tile_top == MINUS_INF, 0.0, tile_top)
                kept = tl.sum(tl.where(values >= cutoff, tl.exp2((values - origin) * scale), 0.0), 0)
            tl.store(sums_ptr + tile, kept)
    tl.store(cutoff_ptr + place, cutoff)


def filter_rows(
    logits: Tensor, cu_rows: Tensor, temperature: Tensor, filters: FilterRows, stats: TileStats, cutoff: Tensor
) -> None:
    """See `naive.filter_rows`."""
    num_requests, num_places, num_tiles = stats.maxima.shape
    filter_rows_kernel[(num_places, num_requests)](
        logits,
        logits.stride(0),
        cu_rows,
        temperature,
        filters.top_k,
        filters.top_p,
        filters.min_p,
        stats.maxima,
        stats.sums,
        cutoff,
        logits.shape[1],
        num_places,
        num_tiles,
        stats.tile,
        next_power_of_two(num_tiles),
        **PER_ROW,
    )
