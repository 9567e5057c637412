"""Device functions of the sampler's kernels: one tile of a row, its statistics, a draw by inverse CDF, a uniform.

Imported by kernel files only, because it imports triton.
"""

# ruff: noqa: ANN001, ANN201, RUF059
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

MINUS_INF = tl.constexpr(float("-inf"))
NO_LANE = tl.constexpr(2**31 - 1)
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-53)
LOG2_E = tl.constexpr(1.4426950408889634)
COLDEST = tl.constexpr(1e-30)
HOTTEST = tl.constexpr(1e30)


@triton.jit
def row_scale(temperature):
    """log2(e) / temperature as `row_distribution.scale_of` rounds it to fp32, finite for every temperature.

    An fp32 quotient, corrected once by its fp64 remainder: an fp64 division would cost as much as a third of a tile.
    """
    limited = tl.minimum(tl.maximum(temperature, COLDEST), HOTTEST)
    quotient = tl.full([], LOG2_E, tl.float32) / limited
    remainder = tl.full([], LOG2_E, tl.float64) - quotient.to(tl.float64) * limited.to(tl.float64)
    return quotient + remainder.to(tl.float32) / limited


@triton.jit
def uniform(seed, position, stream: tl.constexpr, step):
    """The uniform of `philox.uniform`: fp64 on the midpoints of 2^52 cells."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    use = (low * 0 + stream).to(tl.uint32)
    turn = (low * 0 + step).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, use, turn)
    cells = (first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)
    return (cells.to(tl.float64) + 0.5) * 2.2204460492503131e-16


@triton.jit
def load_tile(row_ptr, tile, vocab_size, TILE: tl.constexpr, OTHER: tl.constexpr = MINUS_INF):
    """Load a tile of a row as fp32 [TILE], OTHER beyond the vocabulary. A mask on a full tile would
    scalarise its load.
    """
    ids = tile * TILE + tl.arange(0, TILE)
    if (tile + 1) * TILE <= vocab_size:
        values = tl.load(row_ptr + ids).to(tl.float32)
    else:
        values = tl.load(row_ptr + ids, mask=ids < vocab_size, other=OTHER).to(tl.float32)
    return values


@triton.jit
def tile_stats(values, scale):
    """(maximum, sum of exp2((value - maximum) * scale)) of a tile; the sum is NaN iff the tile has a NaN or +inf.

    The hot path is the subtraction, one product, exp2 and the two reductions. Finding out about NaN costs nothing:
    it poisons the sum, and only then is the maximum of the other values taken again.
    """
    top = tl.max(values, 0)
    origin = tl.where(top == MINUS_INF, 0.0, top)
    total = tl.sum(tl.exp2((values - origin) * scale), 0)
    if total != total:
        top = tl.max(tl.where(values == values, values, MINUS_INF), 0)
    return top, total


@triton.jit
def load_stats(maxima_ptr, sums_ptr, scale, num_tiles, TILES: tl.constexpr):
    """(tile maxima [TILES], tile masses fp64 [TILES], row maximum, row mass, bad) from a row's tile statistics.

    Bad is a row with a NaN or without a finite maximum; its mass is of no use.
    """
    tiles = tl.arange(0, TILES)
    live = tiles < num_tiles
    maxima = tl.load(maxima_ptr + tiles, mask=live, other=MINUS_INF, cache_modifier=".cg")
    sums = tl.load(sums_ptr + tiles, mask=live, other=0.0, cache_modifier=".cg")
    top = tl.max(maxima, 0)
    masses = (sums * tl.exp2((maxima - top) * scale)).to(tl.float64)
    mass = tl.sum(masses, 0)
    bad = (mass > 0) == 0
    return maxima, masses, top, mass, bad


@triton.jit
def last_to_arrive(counter_ptr, SHARED: tl.constexpr):
    """Whether this program is the last of those along axis 0 to come here; the counter is then 0 again."""
    tl.debug_barrier()
    last = tl.full([], 1, tl.int1)
    if SHARED:
        last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1
        if last:
            tl.store(counter_ptr, 0)
    return last


@triton.jit
def pick_lane(weights, u, LANES: tl.constexpr):
    """(lane, rest): the smallest lane whose cumulative weight exceeds u times the total, and what u leaves over.

    weights fp64 [LANES] with a positive total. The lane's own weight is positive. rest in [0, 1) is where within
    the lane the draw fell, to be used for a draw inside it.
    """
    lanes = tl.arange(0, LANES)
    cdf = tl.cumsum(weights, 0)
    target = tl.minimum(u, LARGEST_UNIFORM) * tl.max(cdf, 0)
    lane = tl.min(tl.where((cdf > target) & (weights > 0), lanes, NO_LANE), 0)
    lane = tl.minimum(lane, tl.max(tl.where(weights > 0, lanes, 0), 0))
    upper = tl.sum(tl.where(lanes == lane, cdf, 0.0), 0)
    lower = tl.sum(tl.where(lanes == lane - 1, cdf, 0.0), 0)
    rest = (target - lower) / (upper - lower)
    return lane, tl.minimum(tl.maximum(rest, 0.0), LARGEST_UNIFORM)


@triton.jit
def row_weights(row, tile, vocab_size, TILE: tl.constexpr, FILTERS: tl.constexpr):
    """exp2((logit - top) * scale) of a tile, 0 below the cutoff and beyond the vocabulary; fp32 [TILE].

    row: (pointer, maximum, scale, cutoff, mass).
    """
    row_ptr, top, scale, cutoff, mass = row
    values = load_tile(row_ptr, tile, vocab_size, TILE)
    weights = tl.exp2((values - top) * scale)
    if FILTERS:
        weights = tl.where(values >= cutoff, weights, 0.0)
    return weights


@triton.constexpr_function
def small_width(tile):
    """Width of the parts in which a chosen tile is looked at again: a scan of a whole tile would need its registers."""
    return min(tile, 128)


@triton.jit
def pick_part(weights, u, WIDTH: tl.constexpr, SMALL: tl.constexpr):
    """`pick_lane` among the parts of SMALL neighbours of weights fp32 [WIDTH]."""
    sums = tl.sum(tl.reshape(weights, (WIDTH // SMALL, SMALL)), 1)
    return pick_lane(sums.to(tl.float64), u, WIDTH // SMALL)


@triton.jit
def first_argmax(row_ptr, maxima, top, vocab_size, TILE: tl.constexpr, TILES: tl.constexpr):
    """The lowest id that attains the row maximum, NaN not counting; it lies in the first tile with that maximum."""
    tiles = tl.arange(0, TILES)
    tile = tl.min(tl.where(maxima == top, tiles, NO_LANE), 0)
    values = load_tile(row_ptr, tile, vocab_size, TILE)
    values = tl.where(values == values, values, MINUS_INF)
    ids = tile * TILE + tl.arange(0, TILE)
    return tl.min(tl.where(values == top, ids, NO_LANE), 0)
