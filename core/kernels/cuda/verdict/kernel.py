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

from ..row_tiles import last_to_arrive, load_tile, row_scale, tile_stats
from . import Batch, Requests
from .block import block_is_open, residual_at, share_open_places, share_residual, stop_of_block, survivals_of, thinned
from .residual import ONE_HOT, draw_residual, kind_of, load_residual
from .standard import best_of_row, draw_from_row, index_of, load_row, output_uniform, verify_all

PADDING = tl.constexpr(-1)
BAD_ROW = tl.constexpr(1)
EMPTY_RESIDUAL = tl.constexpr(4)


@triton.jit
def share_row_stats(batch, request, place, scale, split, VARIANT: tl.constexpr):
    """Compute this program's tiles of the statistics of a row that was left out."""
    rows = batch.rows
    row_ptr = rows.logits + (tl.load(batch.requests.cu_rows + request) + place) * rows.stride
    at = index_of(batch, request, place) * rows.num_tiles
    for tile in range(split, rows.num_tiles, tl.num_programs(0)):
        top, total = tile_stats(load_tile(row_ptr, tile, rows.vocab_size, VARIANT.tile), scale)
        tl.store(rows.maxima + at + tile, top)
        tl.store(rows.sums + at + tile, total)


@triton.jit
def report(batch, request, stop, status, VARIANT: tl.constexpr):
    """Write the verdict but for the tokens up to a stop. -1: the request has no rows."""
    outputs = batch.outputs
    places = tl.arange(0, VARIANT.places)
    at = index_of(batch, request, places)
    beyond = (places > stop) & (places <= batch.requests.num_drafts)
    tl.store(outputs.token_ids + at, PADDING, mask=beyond)
    if outputs.path is not None:
        tl.store(outputs.path + at, PADDING, mask=beyond)
    tl.store(outputs.num_accepted + request, tl.maximum(stop, 0))
    tl.store(outputs.status + request, status)


@triton.jit
def emit(batch, kind, request, stop, scale, survival, greedy, rejected, VARIANT: tl.constexpr):
    """Draw the token of the stop and write it with what follows from it."""
    row, maxima, masses, bad = load_row(batch, request, stop, scale, VARIANT)
    token = tl.full([], 0, tl.int32)
    status = tl.where(bad, BAD_ROW, 0)
    if greedy | bad:
        token = best_of_row(row, maxima, batch, VARIANT)
    else:
        u = output_uniform(batch, request, stop, stop)
        found = tl.full([], 0, tl.int1)
        if batch.distributions.kind is not None:
            if rejected:
                left = load_residual(residual_at(batch, request, stop), batch.rows.num_tiles, VARIANT)
                row_left = thinned(row, survival, VARIANT)
                token, found = draw_residual(row_left, left, batch, kind, request, stop, u, VARIANT)
        if found == 0:
            token = draw_from_row(row, masses, batch, u, VARIANT)
            status = tl.where(rejected, EMPTY_RESIDUAL, 0)
    tl.store(batch.outputs.token_ids + index_of(batch, request, stop), token)
    report(batch, request, stop, status, VARIANT)


@triton.jit(do_not_specialize=Requests._fields)
def verdict_kernel(
    rows, distributions, scratch, outputs,
    cu_rows, token_ids, token_stride, lengths, temperature, seed, position, accept, output, num_drafts, parents,
    replacement, VARIANT: tl.constexpr,
):  # fmt: skip
    """Grid [splits, B]."""
    requests = Requests(
        cu_rows, token_ids, token_stride, lengths, temperature, seed, position, accept, output, num_drafts, parents,
        replacement,
    )  # fmt: skip
    batch = Batch(requests, rows, distributions, scratch, outputs)
    split = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    lead = split == 0
    if tl.load(cu_rows + request) >= tl.load(cu_rows + request + 1):
        if lead:
            report(batch, request, -1, 0, VARIANT)
        return
    length = tl.load(lengths + request).to(tl.int32)
    temperature_here = tl.load(temperature + request)
    greedy = temperature_here <= 0
    scale = row_scale(temperature_here)
    kind = kind_of(distributions, request)
    shared = tl.full([], 0, tl.int1)
    survival = tl.full([], 1.0, tl.float64)
    is_open = tl.full([], 0, tl.int1)
    together = tl.full([], 0, tl.int1)
    if VARIANT.block:
        together = (kind != ONE_HOT) & (greedy == 0)
    stop, rejected = verify_all(batch, request, tl.where(together, 0, length), scale, greedy, kind, lead, VARIANT)
    last = tl.full([], 0, tl.int32)
    survivals = tl.full([VARIANT.places], 1.0, tl.float64)
    if VARIANT.block:
        if together:
            survivals, last = survivals_of(batch, request, length, scale, kind, lead, VARIANT)
            stop = last
            is_open = block_is_open(batch, request, survivals, last, VARIANT)
            if VARIANT.shared:
                if is_open:
                    share_open_places(batch, kind, request, survivals, last, scale, split, VARIANT)
                    shared = tl.full([], 1, tl.int1)
    if VARIANT.skip_last:
        if (stop == length) & (is_open == 0):
            share_row_stats(batch, request, stop, scale, split, VARIANT)
            shared = tl.full([], 1, tl.int1)
    if distributions.kind is not None and not VARIANT.block:
        if rejected:
            share_residual(batch, kind, request, stop, scale, survival, split, VARIANT)
            shared = tl.full([], 1, tl.int1)
    writes = lead
    if shared:
        writes = last_to_arrive(scratch.counter + request, VARIANT.shared)
    if writes:
        if VARIANT.block:
            if is_open:
                stop, survival = stop_of_block(batch, kind, request, survivals, last, scale, VARIANT)
                rejected = tl.full([], 1, tl.int1)
        emit(batch, kind, request, stop, scale, survival, greedy, rejected, VARIANT)
