"""The verdict on a batch of trees as one Triton kernel: down from the root, then one more token.

A request is one program's work. A one-hot tree reads the statistics of the places on its path, and of each of them one
tile of logits, from which the token is drawn. Drawn trees are walked in `drawn.py`.
"""

# ruff: noqa: ANN001, ANN201, PLR0913, RUF059, SIM114
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ..launch import PER_BLOCK, PER_ROW
from ..row_tiles import NO_LANE, first_argmax, row_scale
from ..verdict import Distributions, Outputs, Requests, Rows, Scratch, Variant
from ..verdict.kernel import BAD_ROW, BONUS, EMPTY_RESIDUAL, PADDING, REJECTED, emit_nothing, with_step
from ..verdict.residual import ONE_HOT, kind_of
from ..verdict.standard import draw_from_row, load_row, output_uniform, target_prob
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
def probs_of_nodes(row, token_ids, wanted, greedy, vocab_size, VARIANT: tl.constexpr):
    """p of the wanted nodes [places], fp64; of a greedy row 1 for its maximum, and else 0."""
    row_ptr, top, scale, cutoff, mass = row
    known = wanted & (token_ids >= 0) & (token_ids < vocab_size)
    values = tl.load(row_ptr + token_ids, mask=known, other=0.0).to(tl.float32)
    probs = tl.exp2((values - top) * scale).to(tl.float64) / mass
    if VARIANT.filters:
        probs = tl.where(values >= cutoff, probs, 0.0)
    probs = tl.where(greedy, tl.where(values == top, 1.0, 0.0).to(tl.float64), probs)
    return tl.where(known, probs, 0.0)


@triton.jit
def walk(rows, requests, trees, outputs, request, scale, greedy, VARIANT: tl.constexpr):
    """(depth of the path, whether its end has children, status): down as far as a child has the target's token."""
    above, token_ids = load_tree(requests, trees, request, VARIANT)
    nodes = tl.arange(0, VARIANT.places)
    examined = tl.full([VARIANT.places], float("nan"), tl.float32)
    at = request * (requests.num_drafts + 1)
    place, depth, status = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    has_children = tl.full([], 0, tl.int1)
    going = tl.full([], 1, tl.int1)
    while going:
        row, maxima, masses, bad = load_row(rows, request, place, scale, VARIANT)
        if greedy | bad:
            token = first_argmax(row[0], maxima, row[1], rows.vocab_size, VARIANT.tile, VARIANT.tiles).to(tl.int64)
        else:
            u = output_uniform(requests, request, place, depth, VARIANT)
            token = draw_from_row(row, masses, rows.vocab_size, u, VARIANT).to(tl.int64)
        prob, logprob = target_prob(row, token, VARIANT)
        status |= tl.where(bad, BAD_ROW, 0)
        children = above == place
        has_children = tl.max(children.to(tl.int32), 0) > 0
        possible = tl.where(bad, -1, above) == place
        probs = probs_of_nodes(row, token_ids, possible, greedy, rows.vocab_size, VARIANT)
        examined = tl.where(children, probs.to(tl.float32), examined)
        tl.store(trees.path + at + depth, place)
        tl.store(outputs.token_ids + at + depth, token)
        tl.store(outputs.logprobs + at + depth, tl.where(greedy | bad, 0.0, logprob))
        child = tl.min(tl.where(possible & (token_ids == token), nodes, NO_LANE), 0)
        going = child != NO_LANE
        if going:
            place = child.to(tl.int64) + 1
            depth += 1
    tl.store(outputs.accept_prob + request * requests.num_drafts + nodes, examined, mask=nodes < requests.num_drafts)
    return depth, has_children, status


@triton.jit
def last_token(
    rows, requests, distributions, scratch, kind, request, place, depth, entry, left, tree, scale, VARIANT: tl.constexpr
):
    """(token, its log p, whether the row is bad) at the end of a path in a drawn tree; `left`: the mass of R there."""
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
    _, logprob = target_prob(row, token, VARIANT)
    return token, tl.where(bad, 0.0, logprob), bad


@triton.jit
def walk_of_drawn(
    rows, requests, trees, distributions, scratch, outputs, kind, put_back, request, scale, VARIANT: tl.constexpr
):
    """(depth of the path, whether its end has children, status, mass of R there); see `drawn.walk_drawn`."""
    above, token_ids = load_tree(requests, trees, request, VARIANT)
    nodes = tl.arange(0, VARIANT.places)
    depth, path, entries, lefts, tried, scales, norms, examined = walk_drawn(
        rows, requests, distributions, kind, above, token_ids, put_back, request, scale, VARIANT
    )
    tl.store(outputs.accept_prob + request * requests.num_drafts + nodes, examined, mask=nodes < requests.num_drafts)
    at = request * (requests.num_drafts + 1)
    for level in range(depth):
        place = at_index(path, level, VARIANT)
        token = at_index(token_ids, at_index(path, level + 1, VARIANT) - 1, VARIANT)
        row, _, _, _ = load_row(rows, request, place, scale, VARIANT)
        _, logprob = target_prob(row, token, VARIANT)
        tl.store(trees.path + at + level, place)
        tl.store(outputs.token_ids + at + level, token)
        tl.store(outputs.logprobs + at + level, logprob)
    place, left = at_index(path, depth, VARIANT), at_index(lefts, depth, VARIANT)
    tree = (above, token_ids, scales, norms, put_back)
    token, logprob, bad = last_token(
        rows, requests, distributions, scratch, kind, request, place, depth, at_index(entries, depth, VARIANT), left,
        tree, scale, VARIANT,
    )  # fmt: skip
    tl.store(trees.path + at + depth, place)
    tl.store(outputs.token_ids + at + depth, token)
    tl.store(outputs.logprobs + at + depth, logprob)
    empty = (at_index(tried, depth, VARIANT) >= 0) & ((left > 0) == 0)
    status = tl.where(bad, BAD_ROW, 0) | tl.where(empty, EMPTY_RESIDUAL, 0)
    return depth, tl.max((above == place).to(tl.int32), 0) > 0, status, left


@triton.jit
def pad_beyond(requests, trees, outputs, request, depth, VARIANT: tl.constexpr):
    """Behind the end of a path of so many nodes; -1: everywhere."""
    places = tl.arange(0, VARIANT.places)
    at = request * (requests.num_drafts + 1) + places
    beyond = (places > depth) & (places <= requests.num_drafts)
    tl.store(trees.path + at, PADDING, mask=beyond)
    tl.store(outputs.token_ids + at, PADDING, mask=beyond)
    tl.store(outputs.logprobs + at, float("nan"), mask=beyond)


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
    left = tl.full([], float("nan"), tl.float64)
    kind = kind_of(distributions, request, VARIANT)
    if not VARIANT.drawn:
        depth, has_children, status = walk(rows, requests, trees, outputs, request, scale, greedy, VARIANT)
    elif greedy | (kind == ONE_HOT):
        depth, has_children, status = walk(rows, requests, trees, outputs, request, scale, greedy, VARIANT)
    else:
        put_back = tl.full([], 0, tl.int32)
        if PUT_BACK:
            put_back = tl.load(trees.replacement + request).to(tl.int32)
        depth, has_children, status, left = walk_of_drawn(
            rows, requests, trees, distributions, scratch, outputs, kind, put_back, request, scale, VARIANT
        )
    pad_beyond(requests, trees, outputs, request, depth, VARIANT)
    tl.store(outputs.num_accepted + request, depth)
    tl.store(outputs.status + request, status)
    tl.store(outputs.stop_reason + request, tl.where(has_children, REJECTED, BONUS))
    tl.store(outputs.residual_mass + request, left.to(tl.float32))


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
