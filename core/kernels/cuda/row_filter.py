"""Row filters as one Triton kernel: a search between two values, narrowed at several pivots in each pass over a row.

Both top-k and top-p ask for the largest logit such that those at or above it are k in number, or hold a share of
the mass. A float's bits, suitably flipped, order like the float, so the search runs over integers and ends at an
exact logit. A pass reads only tiles whose maximum reaches the lowest value still possible. One program makes all passes
over a row.
"""

# ruff: noqa: ANN001, ANN201, PLR0913, RUF059
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..filters import FilterRows
from .launch import MIN_TILES, PER_ROW, next_power_of_two
from .row_tiles import MINUS_INF, load_stats, load_tile, row_scale
from .verdict import Rows

KEY_BITS = {torch.float32: 32, torch.float16: 19, torch.bfloat16: 16}  # that tell values of this dtype apart in fp32
PIVOTS = tl.constexpr(4)  # looked at in one pass

COUNT = tl.constexpr(0)  # what a search adds up: logits, for top-k
MASS = tl.constexpr(1)  # their mass, for top-p
DONE = tl.constexpr(2)


@triton.jit
def keys_of(values, SHIFT: tl.constexpr):
    """int32 that order as fp32 values do, without the low bits in which values of a narrower dtype never differ."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The fp32 value of an int64 key; the bits left out of a negative value's key were ones."""
    low = tl.where(key < 0, (1 << SHIFT) - 1, 0).to(tl.int64)
    bits = ((key << SHIFT) | low).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    return keys_of(value, SHIFT).to(tl.int64)


@triton.jit
def top_p_search(cutoff, top, scale, top_p, SHIFT: tl.constexpr):
    """(what, least, beyond, wanted) of the search for top-p among the survivors of the other filters.

    A wanted amount below 0 is not known before the mass of the survivors is.
    """
    floor = tl.maximum(cutoff, top - 150.0 / scale)  # what lies lower has no mass in fp32
    what = tl.where(top_p < 1, MASS, DONE)
    return what, key_of(floor, SHIFT), key_of(top, SHIFT) + 1, tl.full([], -1.0, tl.float64)


@triton.jit
def kth_tile_maximum(maxima, k, TILES: tl.constexpr):
    """The k-th largest tile maximum: at least k logits reach it. -inf where there are fewer tiles."""
    descending = tl.sort(maxima, descending=True)
    return tl.max(tl.where(tl.arange(0, TILES) == k - 1, descending, MINUS_INF), 0)


@triton.jit
def first_search(
    maxima, top, scale, temperature, top_k, top_p, min_p, vocab_size, bad, TILES: tl.constexpr, SHIFT: tl.constexpr
):
    """(what, least, beyond, wanted, cutoff) before any pass: top-k if one is asked for, else top-p, else nothing."""
    what = tl.full([], DONE, tl.int32)
    least = tl.full([], 0, tl.int64)
    beyond = tl.full([], 0, tl.int64)
    wanted = tl.full([], 0.0, tl.float64)
    cutoff = tl.full([], MINUS_INF, tl.float32)
    if (temperature > 0) & (bad == 0):
        if min_p > 0:
            cutoff = tl.minimum(top + tl.log2(min_p) / scale, top)
        what, least, beyond, wanted = top_p_search(cutoff, top, scale, top_p, SHIFT)
        if (top_k > 0) & (top_k < vocab_size):
            what = tl.full([], COUNT, tl.int32)
            least = key_of(kth_tile_maximum(maxima, top_k, TILES), SHIFT)
            wanted = top_k.to(tl.float64)
    return what, least, beyond, wanted, cutoff


@triton.jit
def pivot_step(least, beyond):
    return tl.maximum((beyond - least + PIVOTS - 1) // PIVOTS, 1)


@triton.jit
def amounts_above(row, cutoff, what, least, beyond, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """Number or mass (of what reaches the cutoff) of a row's logits at or above each pivot, fp64 [PIVOTS].

    Pivots rise from `least` in equal steps; one that is not below `beyond` has nothing above it. row: (pointer, pointer
    to its tile maxima, maximum, scale, vocabulary size, number of tiles).
    """
    row_ptr, maxima_ptr, top, scale, vocab_size, num_tiles = row
    lanes = tl.arange(0, PIVOTS)
    step = pivot_step(least, beyond)
    amounts = tl.full([PIVOTS], 0.0, tl.float64)
    for tile in range(num_tiles):
        if key_of(tl.load(maxima_ptr + tile), SHIFT) >= least:
            values = load_tile(row_ptr, tile, vocab_size, TILE)
            if what == MASS:
                each = tl.where(values >= cutoff, tl.exp2((values - top) * scale), 0.0)
            else:
                each = tl.where(values > MINUS_INF, 1.0, 0.0)
            keys = keys_of(values, SHIFT)
            for i in range(PIVOTS):
                pivot = tl.minimum(least + i * step, beyond - 1).to(tl.int32)
                amount = tl.sum(tl.where(keys >= pivot, each, 0.0), 0).to(tl.float64)
                amounts += tl.where((lanes == i) & (least + i * step < beyond), amount, 0.0)
    return amounts


@triton.jit
def narrowed(what, least, beyond, wanted, cutoff, amounts, top, scale, top_p, SHIFT: tl.constexpr):
    """(what, least, beyond, wanted, cutoff) after a pass: the next pass of this search, the next search, or done.

    `least` always has the wanted amount at or above it, `beyond` never has.
    """
    lanes = tl.arange(0, PIVOTS)
    step = pivot_step(least, beyond)
    wanted = tl.where(wanted < 0, top_p.to(tl.float64) * tl.max(amounts, 0), wanted)
    reached = (amounts >= wanted) & (least + lanes * step < beyond)
    least += tl.max(tl.where(reached, lanes, 0), 0) * step
    beyond = tl.minimum(beyond, least + step)
    if beyond - least <= 1:
        cutoff = tl.minimum(tl.maximum(cutoff, value_of(least, SHIFT)), top)
        if what == COUNT:
            what, least, beyond, wanted = top_p_search(cutoff, top, scale, top_p, SHIFT)
        else:
            what = tl.full([], DONE, tl.int32)
    return what, least, beyond, wanted, cutoff


@triton.jit
def survivor_sums(row, sums_ptr, cutoff, TILE: tl.constexpr):
    """Replace the sums of a row's tiles by those of what reaches the cutoff."""
    row_ptr, maxima_ptr, top, scale, vocab_size, num_tiles = row
    for tile in range(num_tiles):
        tile_top = tl.load(maxima_ptr + tile)
        kept = tl.full([], 0.0, tl.float32)
        if tile_top >= cutoff:
            values = load_tile(row_ptr, tile, vocab_size, TILE)
            origin = tl.where(tile_top == MINUS_INF, 0.0, tile_top)
            kept = tl.sum(tl.where(values >= cutoff, tl.exp2((values - origin) * scale), 0.0), 0)
        tl.store(sums_ptr + tile, kept)


@triton.jit(do_not_specialize=["cu_rows_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "num_places"])
def filter_rows_kernel(
    rows, cu_rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, num_places,
    TILE: tl.constexpr, TILES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Grid [places, B]."""
    request = tl.program_id(1)
    place = request.to(tl.int64) * num_places + tl.program_id(0)
    at = tl.load(cu_rows_ptr + request) + tl.program_id(0)
    if at >= tl.load(cu_rows_ptr + request + 1):
        return
    temperature = tl.load(temperature_ptr + request)
    scale = row_scale(temperature)
    maxima_ptr, sums_ptr = rows.maxima + place * rows.num_tiles, rows.sums + place * rows.num_tiles
    maxima, masses, top, mass, bad = load_stats(maxima_ptr, sums_ptr, scale, rows.num_tiles, TILES)
    row = (rows.logits + at * rows.stride, maxima_ptr, top, scale, rows.vocab_size, rows.num_tiles)
    top_p = tl.load(top_p_ptr + request)
    what, least, beyond, wanted, cutoff = first_search(
        maxima, top, scale, temperature, tl.load(top_k_ptr + request), top_p, tl.load(min_p_ptr + request),
        rows.vocab_size, bad, TILES, SHIFT,
    )  # fmt: skip
    while what != DONE:
        amounts = amounts_above(row, cutoff, what, least, beyond, TILE, SHIFT)
        what, least, beyond, wanted, cutoff = narrowed(
            what, least, beyond, wanted, cutoff, amounts, top, scale, top_p, SHIFT
        )
    tl.store(rows.cutoff + place, cutoff)
    if cutoff > MINUS_INF:
        survivor_sums(row, sums_ptr, cutoff, TILE)


def filter_rows(rows: Rows, cu_rows: Tensor, temperature: Tensor, filters: FilterRows, tile: int) -> None:
    """Set the cutoff of every row, and the tile sums of filtered rows to those of the survivors.

    A token survives if its logit is at least the cutoff. rows: as `row_stats` left them; filters hold one value per
    request. A greedy row and a bad row keep their sums, with cutoff -inf: their token is their maximum.
    """
    num_requests, num_places, num_tiles = rows.maxima.shape
    sampling = temperature, filters.top_k, filters.top_p, filters.min_p
    tiles, shift = next_power_of_two(max(MIN_TILES, num_tiles)), 32 - KEY_BITS[rows.logits.dtype]
    filter_rows_kernel[(num_places, num_requests)](rows, cu_rows, *sampling, num_places, tile, tiles, shift, **PER_ROW)
