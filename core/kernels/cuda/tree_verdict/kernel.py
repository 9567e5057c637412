"""The verdict on a batch of trees as one Triton kernel: down from the root, then one more token.

A request is one program's work. A one-hot tree reads the statistics of the places on its path, and of each of them one
tile of logits, from which the token is drawn. Drawn trees are walked in `drawn.py`.
"""

# ruff: noqa: ANN001, ANN201, PLR0913, SIM114
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ..launch import PER_BLOCK, PER_ROW
from ..row_tiles import NO_LANE, first_argmax, row_scale
from ..verdict import Distributions, Outputs, Requests, Rows, Scratch, Variant
from ..verdict.kernel import BAD_ROW, EMPTY_RESIDUAL, PADDING, emit_nothing, with_step
from ..verdict.residual import ONE_HOT, kind_of
from ..verdict.standard import draw_from_row, load_row, output_uniform
from . import Trees
from .drawn import at_index, draw_left, walk_drawn


@triton.jit
def load_tree(requests, trees, request, VARIANT: tl.constexpr):
    """(place that each node hangs from, token of each node) [places], no place where there is no node."""
    nodes = tl.arange(0, VARIANT.places)
    there = nodes < tl.load(requests.lengths + request)
    above = tl.load(trees.parents + request * requests.num_drafts + nodes, mask=there, other=0) + 1
    above = tl.where(there & (above <= nodes), above, -1)  # so that every walk ends
    token_ids = tl.load(requests.token_ids + request * requests.token_stride + nodes, mask=there, other=PADDING)
    return above, token_ids


@triton.jit
def walk(rows, requests, trees, outputs, request, scale, greedy, VARIANT: tl.constexpr):
    """(depth of the path, status): down as far as a child has the target's token."""
    above, token_ids = load_tree(requests, trees, request, VARIANT)
    nodes = tl.arange(0, VARIANT.places)
    at = request * (requests.num_drafts + 1)
    place, depth, status = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    going = tl.full([], 1, tl.int1)
    while going:
        row, maxima, masses, bad = load_row(rows, request, place, scale, VARIANT)
        if greedy | bad:
            token = first_argmax(row[0], maxima, row[1], rows.vocab_size, VARIANT.tile, VARIANT.tiles).to(tl.int64)
        else:
            u = output_uniform(requests, request, place, depth, VARIANT)
            token = draw_from_row(row, masses, rows.vocab_size, u, VARIANT).to(tl.int64)
        status |= tl.where(bad, BAD_ROW, 0)
        possible = tl.where(bad, -1, above) == place
        tl.store(trees.path + at + depth, place)
        tl.store(outputs.token_ids + at + depth, token)
        child = tl.min(tl.where(possible & (token_ids == token), nodes, NO_LANE), 0)
        going = child != NO_LANE
        if going:
            place = child.to(tl.int64) + 1
            depth += 1
    return depth, status


@triton.jit
def last_token(
    rows, requests, distributions, scratch, kind, request, place, depth, entry, left, tree, scale, VARIANT: tl.constexpr
):
    """(token, whether the row is bad) at the end of a path in a drawn tree; `left`: the mass of R there."""
    row, maxima, masses, bad = load_row(rows, request, place, scale, VARIANT)
    token = tl.full([], 0, tl.int64)
    found = tl.full([], 0, tl.int1)
    if bad:
        token = first_argmax(row[0], maxima, row[1], rows.vocab_size, VARIANT.tile, VARIANT.tiles).to(tl.int64)
        found = tl.full([], 1, tl.int1)
    u = output_uniform(requests, request, place, depth, VARIANT)
    if (left > 0) & (found == 0):
        token = draw_left(row, entry, rows, distributions, scratch, kind, request, place, tree, u, VARIANT).to(tl.int64)
        found = tl.full([], 1, tl.int1)
    if found == 0:
        token = draw_from_row(row, masses, rows.vocab_size, u, VARIANT).to(tl.int64)
    return token, bad


@triton.jit
def walk_of_drawn(
    rows, requests, trees, distributions, scratch, outputs, kind, put_back, request, scale, VARIANT: tl.constexpr
):
    """(depth of the path, status); see `drawn.walk_drawn`."""
    above, token_ids = load_tree(requests, trees, request, VARIANT)
    depth, path, entries, lefts, tried, scales, norms = walk_drawn(
        rows, requests, distributions, kind, above, token_ids, put_back, request, scale, VARIANT
    )
    at = request * (requests.num_drafts + 1)
    for level in range(depth):
        place = at_index(path, level, VARIANT)
        token = at_index(token_ids, at_index(path, level + 1, VARIANT) - 1, VARIANT)
        tl.store(trees.path + at + level, place)
        tl.store(outputs.token_ids + at + level, token)
    place, left = at_index(path, depth, VARIANT), at_index(lefts, depth, VARIANT)
    tree = (above, token_ids, scales, norms, put_back)
    token, bad = last_token(
        rows, requests, distributions, scratch, kind, request, place, depth, at_index(entries, depth, VARIANT), left,
        tree, scale, VARIANT,
    )  # fmt: skip
    tl.store(trees.path + at + depth, place)
    tl.store(outputs.token_ids + at + depth, token)
    empty = (at_index(tried, depth, VARIANT) >= 0) & ((left > 0) == 0)
    status = tl.where(bad, BAD_ROW, 0) | tl.where(empty, EMPTY_RESIDUAL, 0)
    return depth, status


@triton.jit
def pad_beyond(requests, trees, outputs, request, depth, VARIANT: tl.constexpr):
    """Behind the end of a path of so many nodes; -1: everywhere."""
    places = tl.arange(0, VARIANT.places)
    at = request * (requests.num_drafts + 1) + places
    beyond = (places > depth) & (places <= requests.num_drafts)
    tl.store(trees.path + at, PADDING, mask=beyond)
    tl.store(outputs.token_ids + at, PADDING, mask=beyond)


@triton.jit(do_not_specialize=("cu_rows", *Requests._fields, *Trees._fields))
def tree_verdict_kernel(
    rows, distributions, scratch, outputs,
    cu_rows, token_ids, token_stride, lengths, temperature, seed, position, accept, output, num_drafts, parents,
    replacement, path, PUT_BACK: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """Grid [B]."""
    rows, distributions = with_step(rows, distributions, cu_rows, num_drafts)
    requests = Requests(token_ids, token_stride, lengths, temperature, seed, position, accept, output, num_drafts)
    trees = Trees(parents, replacement, path)
    request = tl.program_id(0).to(tl.int64)
    if tl.load(rows.cu_rows + request) >= tl.load(rows.cu_rows + request + 1):
        pad_beyond(requests, trees, outputs, request, -1, VARIANT)
        emit_nothing(requests, outputs, request, VARIANT)
        return
    temperature_here = tl.load(requests.temperature + request)
    scale = row_scale(temperature_here)
    greedy = temperature_here <= 0
    kind = kind_of(distributions, request, VARIANT)
    if not VARIANT.drawn:
        depth, status = walk(rows, requests, trees, outputs, request, scale, greedy, VARIANT)
    elif greedy | (kind == ONE_HOT):
        depth, status = walk(rows, requests, trees, outputs, request, scale, greedy, VARIANT)
    else:
        put_back = tl.full([], 0, tl.int32)
        if PUT_BACK:
            put_back = tl.load(trees.replacement + request).to(tl.int32)
        depth, status = walk_of_drawn(
            rows, requests, trees, distributions, scratch, outputs, kind, put_back, request, scale, VARIANT
        )
    pad_beyond(requests, trees, outputs, request, depth, VARIANT)
    tl.store(outputs.num_accepted + request, depth)
    tl.store(outputs.status + request, status)


def tree_verdict(
    rows: Rows,
    requests: Requests,
    trees: Trees,
    distributions: Distributions,
    scratch: Scratch,
    outputs: Outputs,
    variant: Variant,
    *,
    put_back: bool,
) -> None:
    """Fill outputs, and the paths. Nothing is allocated, nothing waits for the device."""
    groups = rows._replace(cu_rows=0), distributions, scratch, outputs
    options = PER_BLOCK if variant.drawn else PER_ROW
    grid = (len(outputs.num_accepted),)
    tree_verdict_kernel[grid](*groups, rows.cu_rows, *requests, *trees, put_back, variant, **options)
