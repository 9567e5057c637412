"""The verdict on a batch of trees as one Triton kernel: down from the root, then one more token.

A request is one program's work. A one-hot tree reads the statistics of the places on its path, and of each of them one
tile of logits, from which the token is drawn. Drawn trees are walked in `drawn.py`.
"""

# ruff: noqa: ANN001, ANN201, PLR0913, SIM114
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ..row_tiles import NO_LANE, row_scale
from ..verdict import Batch, Requests
from ..verdict.kernel import BAD_ROW, EMPTY_RESIDUAL, PADDING, report
from ..verdict.residual import ONE_HOT, kind_of
from ..verdict.standard import at_index, best_of_row, draw_from_row, index_of, load_row, output_uniform
from .drawn import draw_left, walk_drawn


@triton.jit
def load_tree(batch, request, VARIANT: tl.constexpr):
    """(place that each node hangs from, token of each node) [places], no place where there is no node."""
    requests = batch.requests
    nodes = tl.arange(0, VARIANT.places)
    there = nodes < tl.load(requests.lengths + request)
    above = tl.load(requests.parents + request * requests.num_drafts + nodes, mask=there, other=0) + 1
    above = tl.where(there & (above <= nodes), above, -1)  # so that every walk ends
    token_ids = tl.load(requests.token_ids + request * requests.token_stride + nodes, mask=there, other=PADDING)
    return above, token_ids


@triton.jit
def put_token(batch, request, depth, place, token):
    """Write what the verdict has at a depth: the place, and the token that it emits."""
    at = index_of(batch, request, depth)
    tl.store(batch.outputs.path + at, place)
    tl.store(batch.outputs.token_ids + at, token)


@triton.jit
def walk(batch, request, scale, greedy, VARIANT: tl.constexpr):
    """(depth of the path, status): down as far as a child has the target's token."""
    above, token_ids = load_tree(batch, request, VARIANT)
    nodes = tl.arange(0, VARIANT.places)
    place, depth, status = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    going = tl.full([], 1, tl.int1)
    while going:
        row, maxima, masses, bad = load_row(batch, request, place, scale, VARIANT)
        if greedy | bad:
            token = best_of_row(row, maxima, batch, VARIANT).to(tl.int64)
        else:
            u = output_uniform(batch, request, place, depth)
            token = draw_from_row(row, masses, batch, u, VARIANT).to(tl.int64)
        status |= tl.where(bad, BAD_ROW, 0)
        possible = tl.where(bad, -1, above) == place
        put_token(batch, request, depth, place, token)
        child = tl.min(tl.where(possible & (token_ids == token), nodes, NO_LANE), 0)
        going = child != NO_LANE
        if going:
            place = child.to(tl.int64) + 1
            depth += 1
    return depth, status


@triton.jit
def last_token(batch, kind, request, place, depth, entry, left, tree, scale, VARIANT: tl.constexpr):
    """(token, whether the row is bad) at the end of a path in a drawn tree; `left`: the mass of R there."""
    row, maxima, masses, bad = load_row(batch, request, place, scale, VARIANT)
    u = output_uniform(batch, request, place, depth)
    if bad:
        token = best_of_row(row, maxima, batch, VARIANT).to(tl.int64)
    elif left > 0:
        token = draw_left(row, entry, batch, kind, request, place, tree, u, VARIANT).to(tl.int64)
    else:
        token = draw_from_row(row, masses, batch, u, VARIANT).to(tl.int64)
    return token, bad


@triton.jit
def walk_of_drawn(batch, kind, put_back, request, scale, VARIANT: tl.constexpr):
    """(depth of the path, status); see `drawn.walk_drawn`."""
    above, token_ids = load_tree(batch, request, VARIANT)
    depth, path, entries, lefts, tried, scales, norms = walk_drawn(
        batch, kind, above, token_ids, put_back, request, scale, VARIANT
    )
    for level in range(depth):
        token = at_index(token_ids, at_index(path, level + 1, VARIANT) - 1, VARIANT)
        put_token(batch, request, level, at_index(path, level, VARIANT), token)
    place, entry, left = (
        at_index(path, depth, VARIANT),
        at_index(entries, depth, VARIANT),
        at_index(lefts, depth, VARIANT),
    )
    tree = (above, token_ids, scales, norms, put_back)
    token, bad = last_token(batch, kind, request, place, depth, entry, left, tree, scale, VARIANT)
    put_token(batch, request, depth, place, token)
    empty = (at_index(tried, depth, VARIANT) >= 0) & ((left > 0) == 0)
    status = tl.where(bad, BAD_ROW, 0) | tl.where(empty, EMPTY_RESIDUAL, 0)
    return depth, status


@triton.jit(do_not_specialize=Requests._fields)
def tree_verdict_kernel(
    rows, distributions, scratch, outputs,
    cu_rows, token_ids, token_stride, lengths, temperature, seed, position, accept, output, num_drafts, parents,
    replacement, VARIANT: tl.constexpr,
):  # fmt: skip
    """Grid [B]."""
    requests = Requests(
        cu_rows, token_ids, token_stride, lengths, temperature, seed, position, accept, output, num_drafts, parents,
        replacement,
    )  # fmt: skip
    batch = Batch(requests, rows, distributions, scratch, outputs)
    request = tl.program_id(0).to(tl.int64)
    if tl.load(cu_rows + request) >= tl.load(cu_rows + request + 1):
        report(batch, request, -1, 0, VARIANT)
        return
    temperature_here = tl.load(temperature + request)
    scale = row_scale(temperature_here)
    greedy = temperature_here <= 0
    kind = kind_of(distributions, request)
    if distributions.kind is None:
        depth, status = walk(batch, request, scale, greedy, VARIANT)
    elif greedy | (kind == ONE_HOT):
        depth, status = walk(batch, request, scale, greedy, VARIANT)
    else:
        put_back = tl.full([], 0, tl.int32)
        if replacement is not None:
            put_back = tl.load(replacement + request).to(tl.int32)
        depth, status = walk_of_drawn(batch, kind, put_back, request, scale, VARIANT)
    report(batch, request, depth, status, VARIANT)
