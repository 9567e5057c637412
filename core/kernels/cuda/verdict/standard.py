"""Device functions that verify the drafts of a request in order: the coupled rule, the ratio test, greedy rows."""

# ruff: noqa: ANN001, ANN201, PLR0913, RUF059
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ...philox import Stream
from ..row_tiles import draw_token, first_argmax, load_stats, uniform
from .residual import ONE_HOT, distribution_prob

ACCEPT = tl.constexpr(int(Stream.ACCEPT))
RESAMPLE = tl.constexpr(int(Stream.RESAMPLE))
NO_PROPOSAL = tl.constexpr(-1)


@triton.jit
def output_uniform(requests, request, place, depth, VARIANT: tl.constexpr):
    """The uniform that draws the token of a place with so many drafts on its path: that of its position."""
    if VARIANT.uniforms:
        drawn = tl.load(requests.output + request * (requests.num_drafts + 1) + place)
    else:
        position = tl.load(requests.position + request) + depth
        drawn = uniform(tl.load(requests.seed + request), position, RESAMPLE, 0)
    return drawn


@triton.jit
def accept_uniform(requests, request, draft, depth, VARIANT: tl.constexpr):
    """The uniform that verifies a draft with so many on its path; see `rejection.uniforms`."""
    if VARIANT.uniforms:
        drawn = tl.load(requests.accept + request * requests.num_drafts + draft)
    else:
        position, turn = tl.load(requests.position + request) + draft, draft + 1
        if not VARIANT.block:
            turn = tl.where(depth == turn, 0, turn)
        drawn = uniform(tl.load(requests.seed + request), position, ACCEPT, turn)
    return drawn


@triton.jit
def load_row(rows, request, place, scale, VARIANT: tl.constexpr):
    """((pointer, maximum, scale, cutoff, mass), tile maxima, tile masses, bad) of the logits row at a place."""
    row_ptr = rows.logits + (tl.load(rows.cu_rows + request) + place) * rows.stride
    at = request * rows.num_places + place
    tiles_at = at * rows.num_tiles
    maxima, masses, top, mass, bad = load_stats(
        rows.maxima + tiles_at, rows.sums + tiles_at, scale, rows.num_tiles, VARIANT.tiles
    )
    cutoff = top
    if VARIANT.filters:
        cutoff = tl.load(rows.cutoff + at)
    return (row_ptr, top, scale, cutoff, mass), maxima, masses, bad


@triton.jit
def target_prob(row, token, VARIANT: tl.constexpr):
    """p of one id."""
    row_ptr, top, scale, cutoff, mass = row
    value = tl.load(row_ptr + token).to(tl.float32)
    prob = tl.exp2((value - top) * scale).to(tl.float64) / mass
    if VARIANT.filters:
        prob = tl.where(value >= cutoff, prob, 0.0)
    return prob


@triton.jit
def draw_from_row(row, masses, vocab_size, u, VARIANT: tl.constexpr):
    """A token of p."""
    row_ptr, top, scale, cutoff, mass = row
    return draw_token(row_ptr, masses, top, scale, cutoff, u, vocab_size, VARIANT.tile, VARIANT.tiles, VARIANT.filters)


@triton.jit
def verify(rows, requests, distributions, request, place, drafted, scale, greedy, kind, VARIANT: tl.constexpr):
    """(accepted, whether its distribution decided) for one draft."""
    row, maxima, masses, bad = load_row(rows, request, place, scale, VARIANT)
    known = (drafted >= 0) & (drafted < rows.vocab_size) & (bad == 0)
    by_distribution = tl.full([], 0, tl.int1)
    if greedy | bad:
        best = first_argmax(row[0], maxima, row[1], rows.vocab_size, VARIANT.tile, VARIANT.tiles)
        accepted = known & (best == drafted)
    elif kind == ONE_HOT:
        u = output_uniform(requests, request, place, place, VARIANT)
        accepted = known & (draw_from_row(row, masses, rows.vocab_size, u, VARIANT) == drafted)
    else:
        token = tl.where(known, drafted, 0)
        prob = tl.where(known, target_prob(row, token, VARIANT), 0.0)
        distribution = distribution_prob(distributions, kind, token, request, place, VARIANT)
        u = accept_uniform(requests, request, place, place + 1, VARIANT)
        possible = (prob > 0) & (distribution != 0)
        accepted = possible & ((prob >= distribution) | (u * distribution < prob))
        by_distribution = tl.full([], 1, tl.int1)
    return accepted, by_distribution


@triton.jit
def verify_all(
    rows, requests, distributions, outputs, request, length, scale, greedy, kind, lead, VARIANT: tl.constexpr
):
    """(place of the stop, whether a distribution rejected there). The leading program reports what was accepted."""
    stop = tl.full([], 0, tl.int32)
    rejected = tl.full([], 0, tl.int1)
    going = length > 0
    while going:
        drafted = tl.load(requests.token_ids + request * requests.token_stride + stop)
        going = drafted != NO_PROPOSAL
        if going:
            accepted, by_distribution = verify(
                rows, requests, distributions, request, stop, drafted, scale, greedy, kind, VARIANT
            )
            rejected = by_distribution & (accepted == 0)
            if lead & accepted:
                tl.store(outputs.token_ids + request * (requests.num_drafts + 1) + stop, drafted)
            stop += accepted.to(tl.int32)
            going = accepted & (stop < length)
    return stop, rejected
