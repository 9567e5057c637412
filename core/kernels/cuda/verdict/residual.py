"""Device functions for drafts with a reported distribution q: q of one id, and draws from the residual (p - q)+."""

# ruff: noqa: ANN001, ANN201, RUF059, SIM102
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from specdec.sdk.distribution_kind import DistributionKind

from ..row_tiles import LOG2_E, MINUS_INF, load_stats, load_tile, pick_lane, pick_part, row_weights, small_width

ONE_HOT = tl.constexpr(int(DistributionKind.ONE_HOT))
DENSE_PROBS = tl.constexpr(int(DistributionKind.DENSE_PROBS))
DENSE_LOGITS = tl.constexpr(int(DistributionKind.DENSE_LOGITS))
SPARSE = tl.constexpr(int(DistributionKind.SPARSE))


@triton.jit
def kind_of(distributions, request):
    """The kind of distribution of a request; one-hot where no tensor of its kind is given."""
    result = tl.full([], ONE_HOT, tl.int32)
    if distributions.kind is not None:
        kind = tl.load(distributions.kind + request).to(tl.int32)
        if distributions.probs is not None:
            result = tl.where(kind == DENSE_PROBS, kind, result)
        if distributions.logits is not None:
            result = tl.where(kind == DENSE_LOGITS, kind, result)
        if distributions.sparse is not None:
            result = tl.where(kind == SPARSE, kind, result)
    return result


@triton.jit
def logits_stats(logits, at, VARIANT: tl.constexpr):
    """(maximum, mass) of the distribution at an index, given as logits. The mass of a row that is no distribution is
    NaN, and so its q.
    """
    tiles_at = at * logits.num_tiles
    maxima, masses, top, mass, bad = load_stats(
        logits.maxima + tiles_at, logits.sums + tiles_at, LOG2_E, logits.num_tiles, VARIANT.tiles
    )
    return top, mass


@triton.jit
def distribution_prob(batch, kind, token, request, place, VARIANT: tl.constexpr):
    """q of one target id at a place, fp64."""
    at = request * batch.requests.num_drafts + place
    probs, logits, sparse = batch.distributions.probs, batch.distributions.logits, batch.distributions.sparse
    prob = tl.full([], 0.0, tl.float64)
    draft = token
    if batch.distributions.t2d is not None:
        draft = tl.load(batch.distributions.t2d + token).to(tl.int64)
    if probs is not None:
        if (kind == DENSE_PROBS) & (draft >= 0) & (draft < probs.size):
            prob = tl.load(probs.table + at * probs.size + draft).to(tl.float64)
    if logits is not None:
        if (kind == DENSE_LOGITS) & (draft >= 0) & (draft < logits.size):
            top, mass = logits_stats(logits, at, VARIANT)
            value = tl.load(logits.table + at * logits.size + draft).to(tl.float32)
            prob = tl.exp2((value - top) * LOG2_E).to(tl.float64) / mass
    if sparse is not None:
        if kind == SPARSE:
            entries = tl.arange(0, VARIANT.sparse)
            places = at * sparse.num_ids + entries
            same = tl.load(sparse.ids + places, mask=entries < sparse.num_ids, other=-1) == token
            prob = tl.sum(tl.load(sparse.probs + places, mask=same, other=0.0).to(tl.float64), 0)
    return prob


@triton.jit
def distribution_at(batch, kind, request, place, VARIANT: tl.constexpr):
    """What `distribution_tile` needs of the distribution of a place: where it begins in its table, and the maximum and
    1 / mass of logits.
    """
    at = request * batch.requests.num_drafts + place
    probs, logits, sparse = batch.distributions.probs, batch.distributions.logits, batch.distributions.sparse
    start = tl.full([], 0, tl.int64)
    top = tl.full([], 0.0, tl.float32)
    inverse = tl.full([], 0.0, tl.float32)
    if probs is not None:
        start = tl.where(kind == DENSE_PROBS, at * probs.size, start)
    if sparse is not None:
        start = tl.where(kind == SPARSE, at * sparse.num_ids, start)
    if logits is not None:
        if kind == DENSE_LOGITS:
            start = at * logits.size
            top, mass = logits_stats(logits, at, VARIANT)
            inverse = (1.0 / mass).to(tl.float32)
    return start, top, inverse


@triton.jit
def dense_tile(batch, dense, start, tile, WIDTH: tl.constexpr, OTHER: tl.constexpr):
    """A dense distribution's table at the target ids of a tile, fp32 [WIDTH]; OTHER where there is no draft id."""
    row_ptr = dense.table + start
    if batch.distributions.t2d is not None:
        ids = tile * WIDTH + tl.arange(0, WIDTH)
        drafts = tl.load(batch.distributions.t2d + ids, mask=ids < batch.rows.vocab_size, other=-1).to(tl.int32)
        known = drafts.to(tl.uint32, bitcast=True) < dense.size.to(tl.uint32)  # -1 is the largest
        values = tl.load(row_ptr + drafts, mask=known, other=OTHER).to(tl.float32)
    else:
        values = load_tile(row_ptr, tile, dense.size, WIDTH, OTHER)
    return values


@triton.jit
def distribution_tile(batch, distribution, kind, tile, WIDTH: tl.constexpr):
    """q of a tile, fp32 [WIDTH]."""
    start, top, inverse = distribution
    probs, logits, sparse = batch.distributions.probs, batch.distributions.logits, batch.distributions.sparse
    q = tl.zeros([WIDTH], tl.float32)
    if probs is not None:
        if kind == DENSE_PROBS:
            q = dense_tile(batch, probs, start, tile, WIDTH, 0.0)
    if logits is not None:
        if kind == DENSE_LOGITS:
            q = tl.exp2((dense_tile(batch, logits, start, tile, WIDTH, MINUS_INF) - top) * LOG2_E) * inverse
    if sparse is not None:
        if kind == SPARSE:
            ids = tile * WIDTH + tl.arange(0, WIDTH)
            for j in range(sparse.num_ids):
                token = tl.load(sparse.ids + start + j).to(tl.int32)
                if (token >= tile * WIDTH) & (token < tl.minimum((tile + 1) * WIDTH, batch.rows.vocab_size)):
                    prob = tl.load(sparse.probs + start + j).to(tl.float32)
                    q += tl.where(ids == token, prob, 0.0)
    return q


@triton.jit
def residual_tile(row, batch, distribution, kind, tile, WIDTH: tl.constexpr):
    """(p - q)+ of a tile, fp32 [WIDTH]. NaN is kept: a distribution that is none empties the residual."""
    row_ptr, top, scale, cutoff, mass = row
    q = distribution_tile(batch, distribution, kind, tile, WIDTH)
    weights = row_weights(row, tile, batch.rows.vocab_size, WIDTH, batch.rows.cutoff is not None)
    return tl.maximum(weights * (1.0 / mass).to(tl.float32) - q, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_residual(sums_ptr, num_tiles, VARIANT: tl.constexpr):
    """Tile masses of a residual, fp64 [tiles]."""
    tiles = tl.arange(0, VARIANT.tiles)
    return tl.load(sums_ptr + tiles, mask=tiles < num_tiles, other=0.0, cache_modifier=".cg").to(tl.float64)


@triton.jit
def draw_residual(row, left, batch, kind, request, place, u, VARIANT: tl.constexpr):
    """(token, found) from the residual, whose tile masses are left."""
    found = tl.sum(left, 0) > 0
    token = tl.full([], 0, tl.int32)
    if found:
        distribution = distribution_at(batch, kind, request, place, VARIANT)
        tile, rest = pick_lane(left, u, VARIANT.tiles)
        SMALL: tl.constexpr = small_width(VARIANT.tile)
        residual = residual_tile(row, batch, distribution, kind, tile, VARIANT.tile)
        part, rest = pick_part(residual, rest, VARIANT.tile, SMALL)
        tile = tile * (VARIANT.tile // SMALL) + part
        residual = residual_tile(row, batch, distribution, kind, tile, SMALL)
        lane, rest = pick_lane(residual.to(tl.float64), rest, SMALL)
        token = tile * SMALL + lane
    return token, found
