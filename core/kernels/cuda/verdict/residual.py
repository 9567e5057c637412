"""Device functions for drafts with a reported distribution q: q of one id, and draws from the residual (p - q)+."""

# ruff: noqa: ANN001, ANN201, RUF059, SIM102
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from specdec.sdk.distribution_kind import DistributionKind

from ..row_tiles import (
    LOG2_E,
    MINUS_INF,
    distribution_weights,
    load_stats,
    load_tile,
    pick_lane,
    pick_part,
    small_width,
)

ONE_HOT = tl.constexpr(int(DistributionKind.ONE_HOT))
DENSE_PROBS = tl.constexpr(int(DistributionKind.DENSE_PROBS))
DENSE_LOGITS = tl.constexpr(int(DistributionKind.DENSE_LOGITS))
SPARSE = tl.constexpr(int(DistributionKind.SPARSE))


@triton.jit
def kind_of(distributions, request, VARIANT: tl.constexpr):
    """The kind of distribution of a request; one-hot where no tensor of its kind is given."""
    result = tl.full([], ONE_HOT, tl.int32)
    if VARIANT.probs or VARIANT.logits or VARIANT.sparse > 0:
        kind = tl.load(distributions.kind + request).to(tl.int32)
        if VARIANT.probs:
            result = tl.where(kind == DENSE_PROBS, kind, result)
        if VARIANT.logits:
            result = tl.where(kind == DENSE_LOGITS, kind, result)
        if VARIANT.sparse > 0:
            result = tl.where(kind == SPARSE, kind, result)
    return result


@triton.jit
def logits_distribution(distribution, request, place, VARIANT: tl.constexpr):
    """(pointer, maximum, mass) of a distribution given as logits. The mass of a row that is no distribution is NaN,
    and so its q.
    """
    row_ptr = distribution.table + request * distribution.stride + place * distribution.step
    at = (request * distribution.num_drafts + place) * distribution.num_tiles
    maxima, masses, top, mass, bad = load_stats(
        distribution.maxima + at, distribution.sums + at, LOG2_E, distribution.num_tiles, VARIANT.tiles
    )
    return row_ptr, top, mass


@triton.jit
def distribution_prob(distributions, kind, token, request, place, VARIANT: tl.constexpr):
    """q of one target id at a place, fp64."""
    prob = tl.full([], 0.0, tl.float64)
    draft = token
    if VARIANT.mapped:
        draft = tl.load(distributions.t2d + token).to(tl.int64)
    if VARIANT.probs:
        if (kind == DENSE_PROBS) & (draft >= 0) & (draft < distributions.probs.size):
            row_ptr = (
                distributions.probs.table + request * distributions.probs.stride + place * distributions.probs.step
            )
            prob = tl.load(row_ptr + draft).to(tl.float64)
    if VARIANT.logits:
        if (kind == DENSE_LOGITS) & (draft >= 0) & (draft < distributions.logits.size):
            row_ptr, top, mass = logits_distribution(distributions.logits, request, place, VARIANT)
            prob = tl.exp2((tl.load(row_ptr + draft).to(tl.float32) - top) * LOG2_E).to(tl.float64) / mass
    if VARIANT.sparse > 0:
        if kind == SPARSE:
            ids, probs, _ = load_sparse(distributions.sparse, request, place, VARIANT)
            prob = tl.sum(tl.where(ids == token, probs.to(tl.float64), 0.0), 0)
    return prob


@triton.jit
def load_distribution(
    row_ptr, size, tile, t2d_ptr, vocab_size, WIDTH: tl.constexpr, MAPPED: tl.constexpr, OTHER: tl.constexpr
):
    """A dense distribution's table at the target ids of a tile, fp32 [WIDTH]; OTHER where there is no draft id."""
    ids = tile * WIDTH + tl.arange(0, WIDTH)
    if MAPPED:
        drafts = tl.load(t2d_ptr + ids, mask=ids < vocab_size, other=-1).to(tl.int32)
        known = drafts.to(tl.uint32, bitcast=True) < size.to(tl.uint32)  # -1 is the largest
        values = tl.load(row_ptr + drafts, mask=known, other=OTHER).to(tl.float32)
    else:
        values = load_tile(row_ptr, tile, size, WIDTH, OTHER)
    return values


@triton.jit
def dense_distribution(distributions, kind, request, place, VARIANT: tl.constexpr):
    """What `residual_tile` needs of the distribution of a place: its probabilities, or its logits, maximum and 1 /
    mass.
    """
    probs_ptr = distributions.probs.table + request * distributions.probs.stride + place * distributions.probs.step
    logits_ptr = distributions.logits.table
    top = tl.full([], 0.0, tl.float32)
    inverse = tl.full([], 0.0, tl.float32)
    if VARIANT.logits:
        if kind == DENSE_LOGITS:
            logits_ptr, top, mass = logits_distribution(distributions.logits, request, place, VARIANT)
            inverse = (1.0 / mass).to(tl.float32)
    return probs_ptr, logits_ptr, top, inverse


@triton.jit
def residual_tile(row, vocab_size, distributions, distribution, kind, tile, WIDTH: tl.constexpr, VARIANT: tl.constexpr):
    """(p - q)+ of a tile, fp32 [WIDTH], for a dense distribution. NaN is kept: a distribution that is none empties
    the residual.
    """
    row_ptr, top, scale, cutoff, mass = row
    weights = distribution_weights(row_ptr, tile, top, scale, cutoff, vocab_size, WIDTH, VARIANT.filters)
    q = dense_tile(weights, vocab_size, distributions, distribution, kind, tile, WIDTH, VARIANT)
    return tl.maximum(weights * (1.0 / mass).to(tl.float32) - q, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def dense_tile(
    weights, vocab_size, distributions, distribution, kind, tile, WIDTH: tl.constexpr, VARIANT: tl.constexpr
):
    """q of a tile, fp32 [WIDTH], for a dense distribution; anything like `weights` for another."""
    probs_ptr, logits_ptr, distribution_top, distribution_inverse = distribution
    q = weights
    if VARIANT.probs:
        if kind == DENSE_PROBS:
            q = load_distribution(
                probs_ptr, distributions.probs.size, tile, distributions.t2d, vocab_size, WIDTH, VARIANT.mapped, 0.0
            )
    if VARIANT.logits:
        if kind == DENSE_LOGITS:
            size = distributions.logits.size
            values = load_distribution(
                logits_ptr, size, tile, distributions.t2d, vocab_size, WIDTH, VARIANT.mapped, MINUS_INF
            )
            q = tl.exp2((values - distribution_top) * LOG2_E) * distribution_inverse
    return q


@triton.jit
def load_residual(sums_ptr, num_tiles, VARIANT: tl.constexpr):
    """Tile masses of a residual, fp64 [tiles]."""
    tiles = tl.arange(0, VARIANT.tiles)
    return tl.load(sums_ptr + tiles, mask=tiles < num_tiles, other=0.0, cache_modifier=".cg").to(tl.float64)


@triton.jit
def draw_dense_residual(row, left, vocab_size, distributions, kind, request, place, u, VARIANT: tl.constexpr):
    """(token, found) from the residual of a dense distribution, whose tile masses are left."""
    found = tl.sum(left, 0) > 0
    token = tl.full([], 0, tl.int32)
    if found:
        distribution = dense_distribution(distributions, kind, request, place, VARIANT)
        tile, rest = pick_lane(left, u, VARIANT.tiles)
        SMALL: tl.constexpr = small_width(VARIANT.tile)
        residual = residual_tile(row, vocab_size, distributions, distribution, kind, tile, VARIANT.tile, VARIANT)
        part, rest = pick_part(residual, rest, VARIANT.tile, SMALL)
        tile = tile * (VARIANT.tile // SMALL) + part
        residual = residual_tile(row, vocab_size, distributions, distribution, kind, tile, SMALL, VARIANT)
        lane, rest = pick_lane(residual.to(tl.float64), rest, SMALL)
        token = tile * SMALL + lane
    return token, found


@triton.jit
def load_sparse(distribution, request, place, VARIANT: tl.constexpr):
    """(ids, probabilities, which of them count) of a sparse distribution, padded to a power of two."""
    lanes = tl.arange(0, VARIANT.sparse)
    at = (request * distribution.num_drafts + place) * distribution.num_ids + lanes
    ids = tl.load(distribution.ids + at, mask=lanes < distribution.num_ids, other=-1)
    probs = tl.load(distribution.probs + at, mask=lanes < distribution.num_ids, other=0.0).to(tl.float32)
    return ids, probs, ids >= 0


@triton.jit
def summed_probs(ids, distribution, request, place, VARIANT: tl.constexpr):
    """(q of each of the ids, whether it stands at an earlier lane too) of a sparse distribution that may repeat ids.

    One entry after the other is compared with all lanes. All with all at once would need M * M registers.
    """
    lanes = tl.arange(0, VARIANT.sparse)
    probs = tl.full([VARIANT.sparse], 0.0, tl.float32)
    repeated = tl.full([VARIANT.sparse], 0, tl.int1)
    first = (request * distribution.num_drafts + place) * distribution.num_ids
    for j in range(distribution.num_ids):
        same = ids == tl.load(distribution.ids + first + j)
        probs += tl.where(same, tl.load(distribution.probs + first + j).to(tl.float32), 0.0)
        repeated |= same & (j < lanes)
    return probs, repeated


@triton.jit
def sparse_masses(row, masses, vocab_size, num_tiles, distribution, request, place, VARIANT: tl.constexpr):
    """Residual mass of each tile without a pass over the vocabulary: tile masses less min(p, q) at the distribution's
    ids.

    Cancellation leaves an error of 1e-7 of the tile's mass. The residual is used with probability equal to its own
    mass, so that this is the error of the emitted distribution too.
    """
    row_ptr, top, scale, cutoff, mass = row
    ids, _, known = load_sparse(distribution, request, place, VARIANT)
    known = known & (ids < vocab_size)
    distribution_probs, repeated = summed_probs(ids, distribution, request, place, VARIANT)
    values = tl.load(row_ptr + ids, mask=known, other=MINUS_INF).to(tl.float32)
    target = tl.exp2((values - top) * scale) * (1.0 / mass).to(tl.float32)
    if VARIANT.filters:
        target = tl.where(values >= cutoff, target, 0.0)
    taken = tl.minimum(target, distribution_probs, propagate_nan=tl.PropagateNan.ALL)
    taken = tl.where(known & (repeated == 0), taken, 0.0).to(tl.float64)
    tiles = tl.arange(0, VARIANT.tiles)
    left = masses / mass
    for tile in range(num_tiles):
        inside = known & (ids // VARIANT.tile == tile)
        left = tl.where(tiles == tile, left - tl.sum(tl.where(inside, taken, 0.0), 0), left)
    return tl.maximum(left, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sparse_residual_tile(
    row, vocab_size, distribution, request, place, tile, WIDTH: tl.constexpr, VARIANT: tl.constexpr
):
    """(p - q)+ of a tile, fp32 [WIDTH], for a sparse distribution."""
    row_ptr, top, scale, cutoff, mass = row
    lanes = tl.arange(0, WIDTH)
    residual = distribution_weights(row_ptr, tile, top, scale, cutoff, vocab_size, WIDTH, VARIANT.filters)
    residual = residual * (1.0 / mass).to(tl.float32)
    for j in range(distribution.num_ids):
        at = (request * distribution.num_drafts + place) * distribution.num_ids + j
        lane = tl.load(distribution.ids + at) - tile * WIDTH
        if (lane >= 0) & (lane < WIDTH):
            residual = tl.where(lanes == lane, residual - tl.load(distribution.probs + at).to(tl.float32), residual)
    return tl.maximum(residual, 0.0)


@triton.jit
def draw_sparse_residual(row, left, vocab_size, distribution, request, place, u, VARIANT: tl.constexpr):
    """(token, found) from the residual of a sparse distribution, whose tile masses are left.

    A tile whose mass was a rounding of nothing turns out empty when it is looked at, and the draw is repeated
    without it.
    """
    token = tl.full([], 0, tl.int32)
    found = tl.full([], 0, tl.int1)
    SMALL: tl.constexpr = small_width(VARIANT.tile)
    while (found == 0) & (tl.sum(left, 0) > 0):
        tile, rest = pick_lane(left, u, VARIANT.tiles)
        residual = sparse_residual_tile(row, vocab_size, distribution, request, place, tile, VARIANT.tile, VARIANT)
        found = tl.sum(residual, 0) > 0
        if found:
            part, rest = pick_part(residual, rest, VARIANT.tile, SMALL)
            small = tile * (VARIANT.tile // SMALL) + part
            closer = sparse_residual_tile(row, vocab_size, distribution, request, place, small, SMALL, VARIANT)
            lane, rest = pick_lane(closer.to(tl.float64), rest, SMALL)
            token = small * SMALL + lane
        left = tl.where(tl.arange(0, VARIANT.tiles) == tile, 0.0, left)
    return token, found
