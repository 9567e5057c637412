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
    if VARIANT.drawn:
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
def sparse_entries(distribution, request, place):
    """(pointer to the ids, pointer to their probabilities) of a sparse distribution."""
    at = (request * distribution.num_drafts + place) * distribution.num_ids
    return distribution.ids + at, distribution.probs + at


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
            ids_ptr, probs_ptr = sparse_entries(distributions.sparse, request, place)
            entries = tl.arange(0, VARIANT.sparse)
            same = tl.load(ids_ptr + entries, mask=entries < distributions.sparse.num_ids, other=-1) == token
            prob = tl.sum(tl.load(probs_ptr + entries, mask=same, other=0.0).to(tl.float64), 0)
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
def distribution_at(distributions, kind, request, place, VARIANT: tl.constexpr):
    """What `distribution_tile` needs of the distribution of a place: its probabilities, or its logits, maximum and 1 /
    mass, or its ids and their probabilities.
    """
    probs_ptr = distributions.probs.table + request * distributions.probs.stride + place * distributions.probs.step
    logits_ptr = distributions.logits.table
    top = tl.full([], 0.0, tl.float32)
    inverse = tl.full([], 0.0, tl.float32)
    if VARIANT.logits:
        if kind == DENSE_LOGITS:
            logits_ptr, top, mass = logits_distribution(distributions.logits, request, place, VARIANT)
            inverse = (1.0 / mass).to(tl.float32)
    ids_ptr, entries_ptr = sparse_entries(distributions.sparse, request, place)
    return probs_ptr, logits_ptr, top, inverse, ids_ptr, entries_ptr


@triton.jit
def residual_tile(row, vocab_size, distributions, distribution, kind, tile, WIDTH: tl.constexpr, VARIANT: tl.constexpr):
    """(p - q)+ of a tile, fp32 [WIDTH]. NaN is kept: a distribution that is none empties the residual."""
    row_ptr, top, scale, cutoff, mass = row
    q = distribution_tile(vocab_size, distributions, distribution, kind, tile, WIDTH, VARIANT)
    weights = distribution_weights(row_ptr, tile, top, scale, cutoff, vocab_size, WIDTH, VARIANT.filters)
    return tl.maximum(weights * (1.0 / mass).to(tl.float32) - q, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def distribution_tile(vocab_size, distributions, distribution, kind, tile, WIDTH: tl.constexpr, VARIANT: tl.constexpr):
    """q of a tile, fp32 [WIDTH]."""
    probs_ptr, logits_ptr, distribution_top, distribution_inverse, ids_ptr, entries_ptr = distribution
    q = tl.zeros([WIDTH], tl.float32)
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
    if VARIANT.sparse > 0:
        if kind == SPARSE:
            ids = tile * WIDTH + tl.arange(0, WIDTH)
            for j in range(distributions.sparse.num_ids):
                token = tl.load(ids_ptr + j).to(tl.int32)
                if (token >= tile * WIDTH) & (token < tl.minimum((tile + 1) * WIDTH, vocab_size)):
                    q += tl.where(ids == token, tl.load(entries_ptr + j).to(tl.float32), 0.0)
    return q


@triton.jit
def load_residual(sums_ptr, num_tiles, VARIANT: tl.constexpr):
    """Tile masses of a residual, fp64 [tiles]."""
    tiles = tl.arange(0, VARIANT.tiles)
    return tl.load(sums_ptr + tiles, mask=tiles < num_tiles, other=0.0, cache_modifier=".cg").to(tl.float64)


@triton.jit
def draw_residual(row, left, vocab_size, distributions, kind, request, place, u, VARIANT: tl.constexpr):
    """(token, found) from the residual, whose tile masses are left."""
    found = tl.sum(left, 0) > 0
    token = tl.full([], 0, tl.int32)
    if found:
        distribution = distribution_at(distributions, kind, request, place, VARIANT)
        tile, rest = pick_lane(left, u, VARIANT.tiles)
        SMALL: tl.constexpr = small_width(VARIANT.tile)
        residual = residual_tile(row, vocab_size, distributions, distribution, kind, tile, VARIANT.tile, VARIANT)
        part, rest = pick_part(residual, rest, VARIANT.tile, SMALL)
        tile = tile * (VARIANT.tile // SMALL) + part
        residual = residual_tile(row, vocab_size, distributions, distribution, kind, tile, SMALL, VARIANT)
        lane, rest = pick_lane(residual.to(tl.float64), rest, SMALL)
        token = tile * SMALL + lane
    return token, found
