"""The verdict on a batch as one Triton kernel: accept drafts in order, stop, emit one more token.

Every program of a request judges its drafts alike, from row statistics and single logits. Where the stop needs a
pass over the vocabulary (a residual of a dense law, or a last row that was left out of the statistics because it is
seldom wanted) the programs share its tiles, and the last to finish draws the token and resets the counter.
"""

# ruff: noqa: ANN001, ANN201, PLR0913, RUF059, SIM102
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ..launch import PER_ROW
from ..philox import Stream
from ..row_tiles import draw_token, first_argmax, load_stats, load_tile, row_scale, tile_stats, uniform
from . import Laws, Outputs, Requests, Rows, Scratch, Variant
from .residual import ONE_HOT, SPARSE, draw_dense_residual, draw_sparse_residual, kind_of, law_prob, residual_tile

ACCEPT = tl.constexpr(int(Stream.ACCEPT))
RESAMPLE = tl.constexpr(int(Stream.RESAMPLE))
NO_PROPOSAL = tl.constexpr(-1)
PADDING = tl.constexpr(-1)
BAD_ROW = tl.constexpr(1)
EMPTY_RESIDUAL = tl.constexpr(4)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def output_coin(requests, request, place, VARIANT: tl.constexpr):
    """The uniform that draws the token of a place."""
    if VARIANT.coins:
        coin = tl.load(requests.output + request * (requests.num_drafts + 1) + place)
    else:
        position = tl.load(requests.position + request) + place
        coin = uniform(tl.load(requests.seed + request), position, RESAMPLE, 0)
    return coin


@triton.jit
def accept_coin(requests, request, place, VARIANT: tl.constexpr):
    """The uniform that judges the draft of a place against its law."""
    if VARIANT.coins:
        coin = tl.load(requests.accept + request * requests.num_drafts + place)
    else:
        position = tl.load(requests.position + request) + place
        coin = uniform(tl.load(requests.seed + request), position, ACCEPT, 0)
    return coin


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
    """(p, log p) of one id. Maximum and mass stay apart: one logarithm of both would cost a rounding of its size."""
    row_ptr, top, scale, cutoff, mass = row
    value = tl.load(row_ptr + token).to(tl.float32)
    exponent = (value - top) * scale
    prob = tl.exp2(exponent).to(tl.float64) / mass
    if VARIANT.filters:
        prob = tl.where(value >= cutoff, prob, 0.0)
    return prob, exponent * LN_2 - tl.log(mass.to(tl.float32))


@triton.jit
def draw_from_row(row, masses, vocab_size, u, VARIANT: tl.constexpr):
    """A token of p."""
    row_ptr, top, scale, cutoff, mass = row
    return draw_token(row_ptr, masses, top, scale, cutoff, u, vocab_size, VARIANT.tile, VARIANT.tiles, VARIANT.filters)


@triton.jit
def judge(rows, requests, laws, request, place, drafted, scale, greedy, kind, VARIANT: tl.constexpr):
    """(accepted, acceptance probability fp64, log p of the draft, whether its law decided) for one draft."""
    row, maxima, masses, bad = load_row(rows, request, place, scale, VARIANT)
    known = (drafted >= 0) & (drafted < rows.vocab_size) & (bad == 0)
    token = tl.where(known, drafted, 0)
    prob, logprob = target_prob(row, token, VARIANT)
    prob = tl.where(known, prob, 0.0)
    by_law = tl.full([], 0, tl.int1)
    if greedy | bad:
        best = first_argmax(row[0], maxima, row[1], rows.vocab_size, VARIANT.tile, VARIANT.tiles)
        accepted = known & (best == drafted)
        prob = tl.where(accepted, 1.0, 0.0).to(tl.float64)
        logprob = logprob * 0.0
    elif kind == ONE_HOT:
        u = output_coin(requests, request, place, VARIANT)
        accepted = known & (draw_from_row(row, masses, rows.vocab_size, u, VARIANT) == drafted)
    else:
        law = law_prob(laws, kind, token, request, place, VARIANT)
        u = accept_coin(requests, request, place, VARIANT)
        accepted = (prob > 0) & ((prob >= law) | (u * law < prob))
        prob = tl.where(prob > 0, tl.minimum(prob / law, 1.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
        by_law = tl.full([], 1, tl.int1)
    return accepted, prob, logprob, by_law


@triton.jit
def judge_all(rows, requests, laws, outputs, request, length, scale, greedy, kind, lead, VARIANT: tl.constexpr):
    """(place of the stop, whether a law rejected there). The leading program reports what was accepted."""
    stop = tl.full([], 0, tl.int32)
    examined = tl.full([], 0, tl.int32)
    rejected = tl.full([], 0, tl.int1)
    going = length > 0
    while going:
        drafted = tl.load(requests.token_ids + request * requests.token_stride + stop)
        going = drafted != NO_PROPOSAL
        if going:
            accepted, prob, logprob, by_law = judge(
                rows, requests, laws, request, stop, drafted, scale, greedy, kind, VARIANT
            )
            examined = stop + 1
            rejected = by_law & (accepted == 0)
            if lead:
                tl.store(outputs.accept_prob + request * requests.num_drafts + stop, prob.to(tl.float32))
                if accepted:
                    at = request * (requests.num_drafts + 1) + stop
                    tl.store(outputs.token_ids + at, drafted)
                    tl.store(outputs.logprobs + at, logprob)
            stop += accepted.to(tl.int32)
            going = accepted & (stop < length)
    if lead:
        places = tl.arange(0, VARIANT.places)
        unexamined = (places >= examined) & (places < requests.num_drafts)
        tl.store(outputs.accept_prob + request * requests.num_drafts + places, float("nan"), mask=unexamined)
    return stop, rejected


@triton.jit
def share_row_stats(rows, request, place, scale, split, VARIANT: tl.constexpr):
    """This program's tiles of the statistics of a row that was left out."""
    row_ptr = rows.logits + (tl.load(rows.cu_rows + request) + place) * rows.stride
    at = (request * rows.num_places + place) * rows.num_tiles
    for tile in range(split, rows.num_tiles, VARIANT.splits):
        top, total = tile_stats(load_tile(row_ptr, tile, rows.vocab_size, VARIANT.tile), scale)
        tl.store(rows.maxima + at + tile, top)
        tl.store(rows.sums + at + tile, total)


@triton.jit
def share_residual(rows, laws, scratch, kind, request, place, scale, split, VARIANT: tl.constexpr):
    """This program's tile masses of the residual."""
    row, maxima, masses, bad = load_row(rows, request, place, scale, VARIANT)
    for tile in range(split, rows.num_tiles, VARIANT.splits):
        residual = residual_tile(row, rows.vocab_size, laws, kind, request, place, tile, VARIANT.tile, VARIANT)
        tl.store(scratch.residual + request * rows.num_tiles + tile, tl.sum(residual, 0))


@triton.jit
def last_to_arrive(counter_ptr, VARIANT: tl.constexpr):
    """Whether this program is the last of its request to come here; the counter is then 0 again."""
    tl.debug_barrier()
    last = tl.full([], 1, tl.int1)
    if VARIANT.splits > 1:
        last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == VARIANT.splits - 1
        if last:
            tl.store(counter_ptr, 0)
    return last


@triton.jit
def emit(rows, requests, laws, scratch, outputs, kind, request, stop, scale, greedy, rejected, VARIANT: tl.constexpr):
    """Draw the token of the stop and write it with what follows from it."""
    row, maxima, masses, bad = load_row(rows, request, stop, scale, VARIANT)
    token = tl.full([], 0, tl.int32)
    status = tl.where(bad, BAD_ROW, 0)
    if greedy | bad:
        token = first_argmax(row[0], maxima, row[1], rows.vocab_size, VARIANT.tile, VARIANT.tiles)
    else:
        u = output_coin(requests, request, stop, VARIANT)
        found = tl.full([], 0, tl.int1)
        if VARIANT.probs or VARIANT.logits:
            if rejected & (kind != SPARSE):
                sums_ptr = scratch.residual + request * rows.num_tiles
                token, found = draw_dense_residual(
                    row, rows.vocab_size, laws, kind, request, stop, sums_ptr, rows.num_tiles, u, VARIANT
                )
        if VARIANT.sparse > 0:
            if rejected & (kind == SPARSE):
                token, found = draw_sparse_residual(
                    row, masses, rows.vocab_size, laws.sparse, request, stop, u, VARIANT
                )
        if found == 0:
            token = draw_from_row(row, masses, rows.vocab_size, u, VARIANT)
            status = tl.where(rejected, EMPTY_RESIDUAL, 0)
    prob, logprob = target_prob(row, token, VARIANT)
    at = request * (requests.num_drafts + 1)
    places = tl.arange(0, VARIANT.places)
    beyond = (places > stop) & (places <= requests.num_drafts)
    tl.store(outputs.token_ids + at + places, PADDING, mask=beyond)
    tl.store(outputs.logprobs + at + places, float("nan"), mask=beyond)
    tl.store(outputs.token_ids + at + stop, token)
    tl.store(outputs.logprobs + at + stop, tl.where(greedy | bad, 0.0, logprob))
    tl.store(outputs.num_accepted + request, stop)
    tl.store(outputs.status + request, status)


@triton.jit
def emit_nothing(requests, outputs, request, VARIANT: tl.constexpr):
    """The verdict on a request without rows."""
    places = tl.arange(0, VARIANT.places)
    at = request * (requests.num_drafts + 1) + places
    tl.store(outputs.token_ids + at, PADDING, mask=places <= requests.num_drafts)
    tl.store(outputs.logprobs + at, float("nan"), mask=places <= requests.num_drafts)
    tl.store(outputs.accept_prob + at - request, float("nan"), mask=places < requests.num_drafts)
    tl.store(outputs.num_accepted + request, 0)
    tl.store(outputs.status + request, 0)


@triton.jit
def verdict_kernel(rows, requests, laws, scratch, outputs, VARIANT: tl.constexpr):
    """Grid [splits, B]."""
    split = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    lead = split == 0
    if tl.load(rows.cu_rows + request) >= tl.load(rows.cu_rows + request + 1):
        if lead:
            emit_nothing(requests, outputs, request, VARIANT)
        return
    length = tl.load(requests.lengths + request).to(tl.int32)
    temperature = tl.load(requests.temperature + request)
    greedy = temperature <= 0
    scale = row_scale(temperature)
    kind = kind_of(laws, request, VARIANT)
    stop, rejected = judge_all(rows, requests, laws, outputs, request, length, scale, greedy, kind, lead, VARIANT)
    shared = tl.full([], 0, tl.int1)
    if VARIANT.skip_last:
        if stop == length:
            share_row_stats(rows, request, stop, scale, split, VARIANT)
            shared = tl.full([], 1, tl.int1)
    if VARIANT.probs or VARIANT.logits:
        if rejected & (kind != SPARSE):
            share_residual(rows, laws, scratch, kind, request, stop, scale, split, VARIANT)
            shared = tl.full([], 1, tl.int1)
    writes = lead
    if shared:
        writes = last_to_arrive(scratch.counter + request, VARIANT)
    if writes:
        emit(rows, requests, laws, scratch, outputs, kind, request, stop, scale, greedy, rejected, VARIANT)


def verdict(rows: Rows, requests: Requests, laws: Laws, scratch: Scratch, outputs: Outputs, variant: Variant) -> None:
    """Fill outputs. Nothing is allocated, nothing waits for the device."""
    num_requests = len(outputs.num_accepted)
    verdict_kernel[(variant.splits, num_requests)](rows, requests, laws, scratch, outputs, variant, **PER_ROW)
