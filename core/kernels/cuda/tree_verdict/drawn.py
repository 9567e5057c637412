"""Device functions that walk trees of drawn drafts; `rejection.drawn_tree`, the plain form, has the rule.

What a place has left, R, is computed anew wherever it is read: the weight that the place came with times p, then for
each child that failed less what that child was drawn from, and scaled. So nothing of vocabulary size is kept.
"""

# ruff: noqa: ANN001, ANN201, PLR0913, RUF059, SIM102
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ..row_tiles import MINUS_INF, NO_LANE, distribution_weights, pick_lane, pick_part, small_width, uniform
from ..verdict.block import residual_at
from ..verdict.residual import (
    SPARSE,
    dense_distribution,
    dense_tile,
    distribution_prob,
    load_residual,
    load_sparse,
    summed_probs,
)
from ..verdict.standard import ACCEPT, load_row, target_prob


@triton.jit
def at_index(values, index, VARIANT: tl.constexpr):
    """Read one number of a vector [places]."""
    return tl.sum(tl.where(tl.arange(0, VARIANT.places) == index, values, 0), 0)


@triton.jit
def put_at(values, index, value, VARIANT: tl.constexpr):
    """The vector [places] with one number in the place of another."""
    return tl.where(tl.arange(0, VARIANT.places) == index, value, values)


@triton.jit
def child_after(above, place, node, VARIANT: tl.constexpr):
    """The first child of a place behind a node; NO_LANE: there is none."""
    nodes = tl.arange(0, VARIANT.places)
    return tl.min(tl.where((above == place) & (nodes > node), nodes, NO_LANE), 0)


@triton.jit
def uniform_of_node(requests, request, node, depth, VARIANT: tl.constexpr):
    """The uniform that verifies a node with so many nodes on its path; see `rejection.uniforms.draw_tree_uniforms`."""
    if VARIANT.uniforms:
        drawn = tl.load(requests.accept + request * requests.num_drafts + node)
    else:
        turn = node + 1
        if not VARIANT.block:
            turn = tl.where(depth == turn, 0, turn)
        drawn = uniform(tl.load(requests.seed + request), tl.load(requests.position + request) + node, ACCEPT, turn)
    return drawn


@triton.jit
def wanted_of(left, drawn, token, place, last, tree, VARIANT: tl.constexpr):
    """(R, q of the child `last` before it is normalised) of one token: of p times the weight, and of q."""
    above, token_ids, scales, norms, put_back = tree
    node = child_after(above, place, -1, VARIANT)
    while node < last:
        left = tl.maximum(left - drawn * at_index(norms, node, VARIANT), 0.0) * at_index(scales, node, VARIANT)
        if (put_back == 0) & (at_index(token_ids, node, VARIANT) == token):
            drawn = drawn * 0.0
        node = child_after(above, place, node, VARIANT)
    return left, drawn


@triton.jit
def wanted_of_many(left, drawn, ids, place, last, tree, VARIANT: tl.constexpr):
    """`wanted_of` for a vector of ids, in fp32."""
    above, token_ids, scales, norms, put_back = tree
    node = child_after(above, place, -1, VARIANT)
    while node < last:
        scale = at_index(scales, node, VARIANT).to(tl.float32)
        left = left - drawn * at_index(norms, node, VARIANT).to(tl.float32)
        left = tl.maximum(left, 0.0, propagate_nan=tl.PropagateNan.ALL) * scale
        taken = (ids == at_index(token_ids, node, VARIANT)) & (put_back == 0)
        drawn = tl.where(taken, 0.0, drawn)
        node = child_after(above, place, node, VARIANT)
    return left, drawn


@triton.jit
def tile_of_place(
    row, entry, rows, distributions, distribution, kind, place, last, tree, tile, WIDTH: tl.constexpr,
    VARIANT: tl.constexpr,
):  # fmt: skip
    """(R, q of the child `last` before it is normalised) of a tile, fp32 [WIDTH], for a dense distribution."""
    row_ptr, top, scale, cutoff, mass = row
    weights = distribution_weights(row_ptr, tile, top, scale, cutoff, rows.vocab_size, WIDTH, VARIANT.filters)
    drawn = dense_tile(weights, rows.vocab_size, distributions, distribution, kind, tile, WIDTH, VARIANT)
    ids = tile * WIDTH + tl.arange(0, WIDTH)
    return wanted_of_many(weights * (entry / mass).to(tl.float32), drawn, ids, place, last, tree, VARIANT)


@triton.jit
def try_dense(row, entry, rows, distributions, kind, request, place, last, earlier, tree, VARIANT: tl.constexpr):
    """(mass of (R - q)+, what q has to be multiplied with) for the child `last` of a place."""
    distribution = dense_distribution(distributions, kind, request, place, VARIANT)
    norm = tl.full([], 1.0, tl.float64)
    if earlier:
        total = tl.full([], 0.0, tl.float64)
        for tile in range(rows.num_tiles):
            left, drawn = tile_of_place(
                row, entry, rows, distributions, distribution, kind, place, last, tree, tile, VARIANT.tile, VARIANT
            )
            total += tl.sum(drawn, 0).to(tl.float64)
        norm = 1.0 / total
    mass = tl.full([], 0.0, tl.float64)
    for tile in range(rows.num_tiles):
        left, drawn = tile_of_place(
            row, entry, rows, distributions, distribution, kind, place, last, tree, tile, VARIANT.tile, VARIANT
        )
        rest = tl.maximum(left - drawn * norm.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
        mass += tl.sum(rest, 0).to(tl.float64)
    return mass, norm


@triton.jit
def sparse_entries(row, entry, rows, distribution, request, place, last, tree, VARIANT: tl.constexpr):
    """(ids, which count, R, q of the child `last` before it is normalised, p) of a sparse distribution's entries."""
    row_ptr, top, scale, cutoff, mass = row
    ids, _, known = load_sparse(distribution, request, place, VARIANT)
    drawn, repeated = summed_probs(ids, distribution, request, place, VARIANT)
    known = known & (ids < rows.vocab_size)
    values = tl.load(row_ptr + ids, mask=known, other=MINUS_INF).to(tl.float32)
    target = tl.exp2((values - top) * scale) * (1.0 / mass).to(tl.float32)
    if VARIANT.filters:
        target = tl.where(values >= cutoff, target, 0.0)
    counts = known & (repeated == 0)
    left, drawn = wanted_of_many(target * entry.to(tl.float32), drawn, ids, place, last, tree, VARIANT)
    return ids, counts, left, drawn, target


@triton.jit
def outside_of(entry, place, last, tree, VARIANT: tl.constexpr):
    """What R is, as a multiple of p, where q is 0."""
    factor, _ = wanted_of(entry, entry * 0.0, -1, place, last, tree, VARIANT)
    return factor


@triton.jit
def try_sparse(row, entry, rows, distributions, request, place, last, earlier, tree, VARIANT: tl.constexpr):
    """Try a child under a sparse distribution, as `try_dense` does under a dense one."""
    ids, counts, left, drawn, target = sparse_entries(
        row, entry, rows, distributions.sparse, request, place, last, tree, VARIANT
    )
    norm = tl.full([], 1.0, tl.float64)
    if earlier:
        norm = 1.0 / tl.sum(tl.where(counts, drawn, 0.0).to(tl.float64), 0)
    rest = tl.maximum(left - drawn * norm.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
    inside = tl.sum(tl.where(counts, target, 0.0).to(tl.float64), 0)
    outside = outside_of(entry, place, last, tree, VARIANT) * tl.maximum(1.0 - inside, 0.0)
    return tl.sum(tl.where(counts, rest, 0.0).to(tl.float64), 0) + outside, norm


@triton.jit
def draw_dense_left(row, entry, rows, distributions, scratch, kind, request, place, tree, u, VARIANT: tl.constexpr):
    """A token of R, of whose children all have failed."""
    distribution = dense_distribution(distributions, kind, request, place, VARIANT)
    sums_ptr = residual_at(rows, scratch, request, place)
    for tile in range(rows.num_tiles):
        left, _ = tile_of_place(
            row, entry, rows, distributions, distribution, kind, place, NO_LANE, tree, tile, VARIANT.tile, VARIANT
        )
        tl.store(sums_ptr + tile, tl.sum(left, 0))
    tl.debug_barrier()
    tile, rest = pick_lane(load_residual(sums_ptr, rows.num_tiles, VARIANT), u, VARIANT.tiles)
    SMALL: tl.constexpr = small_width(VARIANT.tile)
    left, _ = tile_of_place(
        row, entry, rows, distributions, distribution, kind, place, NO_LANE, tree, tile, VARIANT.tile, VARIANT
    )
    part, rest = pick_part(left, rest, VARIANT.tile, SMALL)
    tile = tile * (VARIANT.tile // SMALL) + part
    left, _ = tile_of_place(
        row, entry, rows, distributions, distribution, kind, place, NO_LANE, tree, tile, SMALL, VARIANT
    )
    lane, rest = pick_lane(left.to(tl.float64), rest, SMALL)
    return tile * SMALL + lane


@triton.jit
def sparse_tile(row, factor, ids, counts, left, rows, tile, WIDTH: tl.constexpr, VARIANT: tl.constexpr):
    """R of a tile, fp32 [WIDTH], for a sparse distribution."""
    row_ptr, top, scale, cutoff, mass = row
    weights = distribution_weights(row_ptr, tile, top, scale, cutoff, rows.vocab_size, WIDTH, VARIANT.filters)
    weights = weights * (factor / mass).to(tl.float32)
    lanes = tile * WIDTH + tl.arange(0, WIDTH)
    for j in range(VARIANT.sparse):
        entries = tl.arange(0, VARIANT.sparse) == j
        if tl.max((entries & counts).to(tl.int32), 0) > 0:
            token = tl.sum(tl.where(entries, ids, 0), 0)
            weights = tl.where(lanes == token, tl.sum(tl.where(entries, left, 0.0), 0), weights)
    return weights


@triton.jit
def draw_sparse_left(row, masses, entry, rows, distributions, request, place, tree, u, VARIANT: tl.constexpr):
    """A token of R, of whose children all have failed. A tile whose mass was a rounding of nothing is left out."""
    row_ptr, top, scale, cutoff, mass = row
    ids, counts, left, _, target = sparse_entries(
        row, entry, rows, distributions.sparse, request, place, NO_LANE, tree, VARIANT
    )
    factor = outside_of(entry, place, NO_LANE, tree, VARIANT)
    tiles = tl.arange(0, VARIANT.tiles)
    sums = masses / mass * factor
    for tile in range(rows.num_tiles):
        inside = counts & (ids // VARIANT.tile == tile)
        change = tl.sum(tl.where(inside, left.to(tl.float64) - factor * target.to(tl.float64), 0.0), 0)
        sums = tl.where(tiles == tile, sums + change, sums)
    sums = tl.maximum(sums, 0.0)
    token = tl.full([], 0, tl.int64)
    found = tl.full([], 0, tl.int1)
    SMALL: tl.constexpr = small_width(VARIANT.tile)
    while (found == 0) & (tl.sum(sums, 0) > 0):
        tile, rest = pick_lane(sums, u, VARIANT.tiles)
        weights = sparse_tile(row, factor, ids, counts, left, rows, tile, VARIANT.tile, VARIANT)
        found = tl.sum(weights, 0) > 0
        if found:
            part, rest = pick_part(weights, rest, VARIANT.tile, SMALL)
            small = tile * (VARIANT.tile // SMALL) + part
            closer = sparse_tile(row, factor, ids, counts, left, rows, small, SMALL, VARIANT)
            lane, rest = pick_lane(closer.to(tl.float64), rest, SMALL)
            token = (small * SMALL + lane).to(tl.int64)
        sums = tl.where(tiles == tile, 0.0, sums)
    return token, found


@triton.jit
def try_child(row, entry, rows, distributions, kind, request, place, child, earlier, tree, VARIANT: tl.constexpr):
    """(what the place wants of a child's token, what it was drawn with, mass of (R - q)+, q's multiplier); fp64."""
    above, token_ids, scales, norms, put_back = tree
    renormalised = earlier & (put_back == 0)
    mass = tl.full([], 0.0, tl.float64)
    norm = tl.full([], 1.0, tl.float64)
    if VARIANT.sparse > 0:
        if kind == SPARSE:
            mass, norm = try_sparse(row, entry, rows, distributions, request, place, child, renormalised, tree, VARIANT)
    if VARIANT.probs or VARIANT.logits:
        if kind != SPARSE:
            mass, norm = try_dense(
                row, entry, rows, distributions, kind, request, place, child, renormalised, tree, VARIANT
            )
    token = at_index(token_ids, child, VARIANT)
    known = (token >= 0) & (token < rows.vocab_size)
    token = tl.where(known, token, 0)
    prob, _ = target_prob(row, token, VARIANT)
    drawn = distribution_prob(distributions, kind, token, request, place, VARIANT)
    wanted, drawn = wanted_of(entry * prob, drawn, token, place, child, tree, VARIANT)
    return tl.where(known, wanted, 0.0), drawn * norm, mass, norm


@triton.jit
def walk_drawn(rows, requests, distributions, kind, above, token_ids, put_back, request, scale, VARIANT: tl.constexpr):
    """(depth, path, weights at entry, mass, scales and norms of nodes, examined) of where the rule ends."""
    ones, nothing = tl.full([VARIANT.places], 1.0, tl.float64), tl.full([VARIANT.places], float("nan"), tl.float64)
    path = tl.full([VARIANT.places], 0, tl.int64)
    tried = tl.full([VARIANT.places], -1, tl.int32)
    entries, weights, masses, scales, norms = ones, ones, nothing, ones, ones
    examined = nothing.to(tl.float32)
    depth = tl.full([], 0, tl.int32)
    going = tl.full([], 1, tl.int1)
    while going:
        place = at_index(path, depth, VARIANT)
        row, _, _, bad = load_row(rows, request, place, scale, VARIANT)
        before, weight = at_index(tried, depth, VARIANT), at_index(weights, depth, VARIANT)
        child = child_after(tl.where(bad, -1, above), place, before, VARIANT)
        if child == NO_LANE:
            u = uniform_of_node(requests, request, tl.maximum(place - 1, 0), depth, VARIANT)
            going = (depth > 0) & (u >= weight)
            if going:
                depth -= 1
        else:
            tree = (above, token_ids, scales, norms, put_back)
            entry = at_index(entries, depth, VARIANT)
            wanted, drawn, mass, norm = try_child(
                row, entry, rows, distributions, kind, request, place, child, before >= 0, tree, VARIANT
            )
            rest = mass + (1.0 - weight)
            possible = (wanted > 0) & (drawn > 0)
            accept = tl.where(possible, tl.minimum(wanted / drawn, 1.0), 0.0)
            scales = put_at(scales, child, tl.where(mass > 0, 1.0 / rest, 0.0), VARIANT)
            norms = put_at(norms, child, norm, VARIANT)
            masses = put_at(masses, depth, mass, VARIANT)
            tried = put_at(tried, depth, child, VARIANT)
            examined = put_at(examined, child, accept.to(tl.float32), VARIANT)
            if VARIANT.block:
                weights = put_at(weights, depth, tl.where(mass > 0, mass / rest, 0.0), VARIANT)
                down = accept > 0
            else:
                u = uniform_of_node(requests, request, child, depth + 1, VARIANT)
                down = (accept >= 1) | (possible & (u * drawn < wanted))
                accept = accept * 0.0 + 1.0
            if down:
                depth += 1
                path = put_at(path, depth, child.to(tl.int64) + 1, VARIANT)
                entries = put_at(entries, depth, accept, VARIANT)
                weights = put_at(weights, depth, accept, VARIANT)
                masses = put_at(masses, depth, float("nan"), VARIANT)
                tried = put_at(tried, depth, -1, VARIANT)
    return depth, path, entries, masses, tried, scales, norms, examined
