"""The verdict on a batch as one Triton kernel: accept drafts in order, stop, emit one more token.

Every program of a request verifies its drafts alike, from row statistics and single logits. Where the stop needs a
pass over the vocabulary (a residual, or a last row that was left out of the statistics
because it is seldom wanted) the programs share its tiles, and the last to finish draws the token and resets the
counter.
"""

# ruff: noqa: ANN001, ANN201, C901, PLR0913, SIM102
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ..launch import PER_BLOCK, PER_ROW
from ..row_tiles import first_argmax, last_to_arrive, load_tile, row_scale, tile_stats
from . import DenseDistribution, Distributions, Outputs, Requests, Rows, Scratch, SparseDistribution, Variant
from .block import block_is_open, residual_at, share_open_places, share_residual, stop_of_block, survivals_of, thinned
from .residual import ONE_HOT, draw_residual, kind_of, load_residual
from .standard import draw_from_row, load_row, output_uniform, verify_all

PADDING = tl.constexpr(-1)
BAD_ROW = tl.constexpr(1)
EMPTY_RESIDUAL = tl.constexpr(4)


@triton.jit
def share_row_stats(rows, request, place, scale, split, VARIANT: tl.constexpr):
    """Compute this program's tiles of the statistics of a row that was left out."""
    row_ptr = rows.logits + (tl.load(rows.cu_rows + request) + place) * rows.stride
    at = (request * rows.num_places + place) * rows.num_tiles
    for tile in range(split, rows.num_tiles, tl.num_programs(0)):
        top, total = tile_stats(load_tile(row_ptr, tile, rows.vocab_size, VARIANT.tile), scale)
        tl.store(rows.maxima + at + tile, top)
        tl.store(rows.sums + at + tile, total)


@triton.jit
def emit(
    rows, requests, distributions, scratch, outputs, kind, request, stop, scale, survival, greedy, rejected,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Draw the token of the stop and write it with what follows from it."""
    row, maxima, masses, bad = load_row(rows, request, stop, scale, VARIANT)
    token = tl.full([], 0, tl.int32)
    status = tl.where(bad, BAD_ROW, 0)
    if greedy | bad:
        token = first_argmax(row[0], maxima, row[1], rows.vocab_size, VARIANT.tile, VARIANT.tiles)
    else:
        u = output_uniform(requests, request, stop, stop, VARIANT)
        found = tl.full([], 0, tl.int1)
        if VARIANT.drawn:
            if rejected:
                left = load_residual(residual_at(rows, scratch, request, stop), rows.num_tiles, VARIANT)
                token, found = draw_residual(
                    thinned(row, survival, VARIANT), left, rows.vocab_size, distributions, kind, request, stop, u,
                    VARIANT,
                )  # fmt: skip
        if found == 0:
            token = draw_from_row(row, masses, rows.vocab_size, u, VARIANT)
            status = tl.where(rejected, EMPTY_RESIDUAL, 0)
    at = request * (requests.num_drafts + 1)
    places = tl.arange(0, VARIANT.places)
    beyond = (places > stop) & (places <= requests.num_drafts)
    tl.store(outputs.token_ids + at + places, PADDING, mask=beyond)
    tl.store(outputs.token_ids + at + stop, token)
    tl.store(outputs.num_accepted + request, stop)
    tl.store(outputs.status + request, status)


@triton.jit
def emit_nothing(requests, outputs, request, VARIANT: tl.constexpr):
    """The verdict on a request without rows."""
    places = tl.arange(0, VARIANT.places)
    at = request * (requests.num_drafts + 1) + places
    tl.store(outputs.token_ids + at, PADDING, mask=places <= requests.num_drafts)
    tl.store(outputs.num_accepted + request, 0)
    tl.store(outputs.status + request, 0)


@triton.jit
def with_dense(dense, num_drafts):
    stride = tl.full([], dense.step, tl.int64) * num_drafts
    return DenseDistribution(
        dense.table, stride, dense.step, dense.size, dense.maxima, dense.sums, dense.num_tiles, num_drafts
    )


@triton.jit
def with_step(rows, distributions, cu_rows, num_drafts):
    """The groups with what is the step's put in."""
    sparse = distributions.sparse
    rows = Rows(
        rows.logits, rows.stride, cu_rows, rows.maxima, rows.sums, rows.cutoff, rows.vocab_size, num_drafts + 1,
        rows.num_tiles,
    )  # fmt: skip
    distributions = Distributions(
        distributions.kind,
        with_dense(distributions.probs, num_drafts),
        with_dense(distributions.logits, num_drafts),
        SparseDistribution(sparse.ids, sparse.probs, sparse.num_ids, num_drafts),
        distributions.t2d,
    )
    return rows, distributions


@triton.jit(do_not_specialize=("cu_rows", *Requests._fields))
def verdict_kernel(
    rows, distributions, scratch, outputs,
    cu_rows, token_ids, token_stride, lengths, temperature, seed, position, accept, output, num_drafts,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """Grid [splits, B]."""
    rows, distributions = with_step(rows, distributions, cu_rows, num_drafts)
    requests = Requests(token_ids, token_stride, lengths, temperature, seed, position, accept, output, num_drafts)
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
    kind = kind_of(distributions, request, VARIANT)
    shared = tl.full([], 0, tl.int1)
    survival = tl.full([], 1.0, tl.float64)
    is_open = tl.full([], 0, tl.int1)
    last = tl.full([], 0, tl.int32)
    survivals = tl.full([VARIANT.places], 1.0, tl.float64)
    if VARIANT.block:
        if (kind != ONE_HOT) & (greedy == 0):
            survivals, last = survivals_of(
                rows, requests, distributions, outputs, request, length, scale, kind, lead, VARIANT
            )
            stop = last
            rejected = tl.full([], 0, tl.int1)
            is_open = block_is_open(requests, request, survivals, last, VARIANT)
            if VARIANT.shared:
                if is_open:
                    share_open_places(
                        rows, requests, distributions, scratch, kind, request, survivals, last, scale, split, VARIANT
                    )
                    shared = tl.full([], 1, tl.int1)
        else:
            stop, rejected = verify_all(
                rows, requests, distributions, outputs, request, length, scale, greedy, kind, lead, VARIANT
            )
    else:
        stop, rejected = verify_all(
            rows, requests, distributions, outputs, request, length, scale, greedy, kind, lead, VARIANT
        )
    if VARIANT.skip_last:
        if (stop == length) & (is_open == 0):
            share_row_stats(rows, request, stop, scale, split, VARIANT)
            shared = tl.full([], 1, tl.int1)
    if VARIANT.drawn and not VARIANT.block:
        if rejected:
            share_residual(rows, distributions, scratch, kind, request, stop, scale, survival, split, VARIANT)
            shared = tl.full([], 1, tl.int1)
    writes = lead
    if shared:
        writes = last_to_arrive(scratch.counter + request, VARIANT.shared)
    if writes:
        if VARIANT.block:
            if is_open:
                stop, survival = stop_of_block(
                    rows, requests, distributions, scratch, kind, request, survivals, last, scale, VARIANT
                )
                rejected = tl.full([], 1, tl.int1)
        emit(
            rows,
            requests,
            distributions,
            scratch,
            outputs,
            kind,
            request,
            stop,
            scale,
            survival,
            greedy,
            rejected,
            VARIANT,
        )


def verdict(
    rows: Rows,
    requests: Requests,
    distributions: Distributions,
    scratch: Scratch,
    outputs: Outputs,
    variant: Variant,
    splits: int,
) -> None:
    """Fill outputs by `splits` programs per request. Nothing is allocated, nothing waits for the device."""
    num_requests = len(outputs.num_accepted)
    options = PER_BLOCK if variant.block else PER_ROW
    groups = rows._replace(cu_rows=0), distributions, scratch, outputs
    verdict_kernel[(splits, num_requests)](*groups, rows.cu_rows, *requests, variant, **options)
