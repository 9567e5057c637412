"""Device functions that verify the drafts of a request in order: the coupled rule, the ratio test, greedy rows."""

# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ...philox import Stream
from ..row_tiles import first_argmax, load_stats, pick_lane, pick_part, row_weights, small_width, uniform
from .residual import ONE_HOT, distribution_prob

ACCEPT = tl.constexpr(int(Stream.ACCEPT))
RESAMPLE = tl.constexpr(int(Stream.RESAMPLE))
NO_PROPOSAL = tl.constexpr(-1)


@triton.jit
def index_of(batch, request, place):
    """Where a place of a request is in tensors [B, K + 1]."""
    return request * (batch.requests.num_drafts + 1) + place


@triton.jit
def at_index(values, index, VARIANT: tl.constexpr):
    """Read one number of a vector [places]."""
    return tl.sum(tl.where(tl.arange(0, VARIANT.places) == index, values, 0), 0)


@triton.jit
def output_uniform(batch, request, place, depth):
    """The uniform that draws the token of a place with so many drafts on its path: that of its position."""
    requests = batch.requests
    if requests.output is not None:
        drawn = tl.load(requests.output + index_of(batch, request, place))
    else:
        position = tl.load(requests.position + request) + depth
        drawn = uniform(tl.load(requests.seed + request), position, RESAMPLE, 0)
    return drawn


@triton.jit
def accept_uniform(batch, request, draft, depth, VARIANT: tl.constexpr):
    """The uniform that verifies a draft with so many on its path; see `rejection.uniforms`."""
    requests = batch.requests
    if requests.accept is not None:
        drawn = tl.load(requests.accept + request * requests.num_drafts + draft)
    else:
        position, turn = tl.load(requests.position + request) + draft, draft + 1
        if not VARIANT.block:
            turn = tl.where(depth == turn, 0, turn)
        drawn = uniform(tl.load(requests.seed + request), position, ACCEPT, turn)
    return drawn


@triton.jit
def load_row(batch, request, place, scale, VARIANT: tl.constexpr):
    """((pointer, maximum, scale, cutoff, mass), tile maxima, tile masses, bad) of the logits row at a place."""
    rows = batch.rows
    row_ptr = rows.logits + (tl.load(batch.requests.cu_rows + request) + place) * rows.stride
    at = index_of(batch, request, place)
    tiles_at = at * rows.num_tiles
    maxima, masses, top, mass, bad = load_stats(
        rows.maxima + tiles_at, rows.sums + tiles_at, scale, rows.num_tiles, VARIANT.tiles
    )
    cutoff = top
    if rows.cutoff is not None:
        cutoff = tl.load(rows.cutoff + at)
    return (row_ptr, top, scale, cutoff, mass), maxima, masses, bad


@triton.jit
def target_prob(row, batch, token):
    """p of one id."""
    row_ptr, top, scale, cutoff, mass = row
    value = tl.load(row_ptr + token).to(tl.float32)
    prob = tl.exp2((value - top) * scale).to(tl.float64) / mass
    if batch.rows.cutoff is not None:
        prob = tl.where(value >= cutoff, prob, 0.0)
    return prob


@triton.jit
def probs_of(row, batch, kind, drafted, request, place, VARIANT: tl.constexpr):
    """(p, q) of a draft at a place; p is 0 for an id outside the vocabulary."""
    known = (drafted >= 0) & (drafted < batch.rows.vocab_size)
    token = tl.where(known, drafted, 0)
    prob = tl.where(known, target_prob(row, batch, token), 0.0)
    return prob, distribution_prob(batch, kind, token, request, place, VARIANT)


@triton.jit
def best_of_row(row, maxima, batch, VARIANT: tl.constexpr):
    """The token of the row maximum."""
    return first_argmax(row[0], maxima, row[1], batch.rows.vocab_size, VARIANT.tile, VARIANT.tiles)


@triton.jit
def draw_from_row(row, masses, batch, u, VARIANT: tl.constexpr):
    """A token of p by inverse CDF in index order: tile, part of the tile, token."""
    vocab_size = batch.rows.vocab_size
    FILTERS: tl.constexpr = batch.rows.cutoff is not None
    SMALL: tl.constexpr = small_width(VARIANT.tile)
    tile, rest = pick_lane(masses, u, VARIANT.tiles)
    weights = row_weights(row, tile, vocab_size, VARIANT.tile, FILTERS)
    part, rest = pick_part(weights, rest, VARIANT.tile, SMALL)
    small = tile * (VARIANT.tile // SMALL) + part
    weights = row_weights(row, small, vocab_size, SMALL, FILTERS)
    lane, rest = pick_lane(weights.to(tl.float64), rest, SMALL)
    return small * SMALL + lane


@triton.jit
def verify(batch, request, place, drafted, scale, greedy, kind, VARIANT: tl.constexpr):
    """(accepted, whether its distribution decided) for one draft."""
    row, maxima, masses, bad = load_row(batch, request, place, scale, VARIANT)
    known = (drafted >= 0) & (drafted < batch.rows.vocab_size) & (bad == 0)
    by_distribution = tl.full([], 0, tl.int1)
    if greedy | bad:
        accepted = known & (best_of_row(row, maxima, batch, VARIANT) == drafted)
    elif kind == ONE_HOT:
        u = output_uniform(batch, request, place, place)
        accepted = known & (draw_from_row(row, masses, batch, u, VARIANT) == drafted)
    else:
        prob, distribution = probs_of(row, batch, kind, drafted, request, place, VARIANT)
        u = accept_uniform(batch, request, place, place + 1, VARIANT)
        possible = (prob > 0) & (distribution != 0)
        accepted = possible & ((prob >= distribution) | (u * distribution < prob))
        by_distribution = tl.full([], 1, tl.int1)
    return accepted, by_distribution


@triton.jit
def verify_all(batch, request, length, scale, greedy, kind, lead, VARIANT: tl.constexpr):
    """(place of the stop, whether a distribution rejected there). The leading program reports what was accepted."""
    stop = tl.full([], 0, tl.int32)
    rejected = tl.full([], 0, tl.int1)
    going = length > 0
    while going:
        drafted = tl.load(batch.requests.token_ids + request * batch.requests.token_stride + stop)
        going = drafted != NO_PROPOSAL
        if going:
            accepted, by_distribution = verify(batch, request, stop, drafted, scale, greedy, kind, VARIANT)
            rejected = by_distribution & (accepted == 0)
            if lead & accepted:
                tl.store(batch.outputs.token_ids + index_of(batch, request, stop), drafted)
            stop += accepted.to(tl.int32)
            going = accepted & (stop < length)
    return stop, rejected
