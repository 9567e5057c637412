"""Device functions that walk trees of drawn drafts; `rejection.drawn_tree`, the plain form, has the rule.

What a place has left, R, is computed anew wherever it is read: the weight that the place came with times p, then for
each child that failed less what that child was drawn from, and scaled. So nothing of vocabulary size is kept.

at, a place: (its row, the weight that it came with, its distribution, the kind of that, its number, the tree).
"""

# ruff: noqa: ANN001, ANN201, PLR0913, RUF059
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from ..row_tiles import NO_LANE, pick_lane, pick_part, row_weights, small_width
from ..verdict.block import residual_at
from ..verdict.residual import distribution_at, distribution_tile, load_residual
from ..verdict.standard import accept_uniform, at_index, load_row, probs_of


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
def wanted_of(left, drawn, ids, place, last, tree, VARIANT: tl.constexpr):
    """(R, q of the child `last` before it is normalised) of some ids: of p times the weight, and of q."""
    above, token_ids, scales, norms, put_back = tree
    node = child_after(above, place, -1, VARIANT)
    while node < last:
        scale, norm = at_index(scales, node, VARIANT).to(left.dtype), at_index(norms, node, VARIANT).to(left.dtype)
        left = tl.maximum(left - drawn * norm, 0.0, propagate_nan=tl.PropagateNan.ALL) * scale
        taken = (ids == at_index(token_ids, node, VARIANT)) & (put_back == 0)
        drawn = tl.where(taken, 0.0, drawn)
        node = child_after(above, place, node, VARIANT)
    return left, drawn


@triton.jit
def tile_of_place(batch, at, last, tile, WIDTH: tl.constexpr, VARIANT: tl.constexpr):
    """(R, q of the child `last` before it is normalised) of a tile, fp32 [WIDTH]."""
    row, entry, distribution, kind, place, tree = at
    row_ptr, top, scale, cutoff, mass = row
    drawn = distribution_tile(batch, distribution, kind, tile, WIDTH)
    weights = row_weights(row, tile, batch.rows.vocab_size, WIDTH, batch.rows.cutoff is not None)
    ids = tile * WIDTH + tl.arange(0, WIDTH)
    return wanted_of(weights * (entry / mass).to(tl.float32), drawn, ids, place, last, tree, VARIANT)


@triton.jit
def mass_left(batch, at, last, earlier, VARIANT: tl.constexpr):
    """(mass of (R - q)+, what q has to be multiplied with) for the child `last` of a place."""
    HALF: tl.constexpr = VARIANT.tile // 2  # of a tile: a whole one would need too many registers
    norm = tl.full([], 1.0, tl.float64)
    if earlier:
        total = tl.full([], 0.0, tl.float64)
        for tile in range(2 * batch.rows.num_tiles):
            left, drawn = tile_of_place(batch, at, last, tile, HALF, VARIANT)
            total += tl.sum(drawn, 0).to(tl.float64)
        norm = 1.0 / total
    mass = tl.full([], 0.0, tl.float64)
    for tile in range(2 * batch.rows.num_tiles):
        left, drawn = tile_of_place(batch, at, last, tile, HALF, VARIANT)
        rest = tl.maximum(left - drawn * norm.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
        mass += tl.sum(rest, 0).to(tl.float64)
    return mass, norm


@triton.jit
def halves_left(batch, at, tile, VARIANT: tl.constexpr):
    """The mass of R in each half of a tile, of whose children all have failed: fp32 [2]."""
    HALF: tl.constexpr = VARIANT.tile // 2
    masses = tl.zeros([2], tl.float32)
    for half in range(2):
        left, _ = tile_of_place(batch, at, NO_LANE, 2 * tile + half, HALF, VARIANT)
        masses = tl.where(tl.arange(0, 2) == half, tl.sum(left, 0), masses)
    return masses


@triton.jit
def draw_left(row, entry, batch, kind, request, place, tree, u, VARIANT: tl.constexpr):
    """A token of R, of whose children all have failed."""
    HALF: tl.constexpr = VARIANT.tile // 2
    SMALL: tl.constexpr = small_width(HALF)
    at = (row, entry, distribution_at(batch, kind, request, place, VARIANT), kind, place, tree)
    sums_ptr = residual_at(batch, request, place)
    for tile in range(batch.rows.num_tiles):
        masses = halves_left(batch, at, tile, VARIANT)
        tl.store(sums_ptr + tile, tl.sum(masses, 0))
    tl.debug_barrier()
    tile, rest = pick_lane(load_residual(sums_ptr, batch.rows.num_tiles, VARIANT), u, VARIANT.tiles)
    masses = halves_left(batch, at, tile, VARIANT)
    half, rest = pick_lane(masses.to(tl.float64), rest, 2)
    tile = 2 * tile + half
    left, _ = tile_of_place(batch, at, NO_LANE, tile, HALF, VARIANT)
    part, rest = pick_part(left, rest, HALF, SMALL)
    tile = tile * (HALF // SMALL) + part
    left, _ = tile_of_place(batch, at, NO_LANE, tile, SMALL, VARIANT)
    lane, rest = pick_lane(left.to(tl.float64), rest, SMALL)
    return tile * SMALL + lane


@triton.jit
def try_child(row, entry, batch, kind, request, place, child, earlier, tree, VARIANT: tl.constexpr):
    """(what the place wants of a child's token, what it was drawn with, mass of (R - q)+, q's multiplier); fp64."""
    above, token_ids, scales, norms, put_back = tree
    renormalised = earlier & (put_back == 0)
    at = (row, entry, distribution_at(batch, kind, request, place, VARIANT), kind, place, tree)
    mass, norm = mass_left(batch, at, child, renormalised, VARIANT)
    token = at_index(token_ids, child, VARIANT)
    prob, drawn = probs_of(row, batch, kind, token, request, place, VARIANT)
    wanted, drawn = wanted_of(entry * prob, drawn, token, place, child, tree, VARIANT)
    return wanted, drawn * norm, mass, norm


@triton.jit
def walk_drawn(batch, kind, above, token_ids, put_back, request, scale, VARIANT: tl.constexpr):
    """(depth, path, weights at entry, mass, scales and norms of nodes) of where the rule ends."""
    ones, nothing = tl.full([VARIANT.places], 1.0, tl.float64), tl.full([VARIANT.places], float("nan"), tl.float64)
    path = tl.full([VARIANT.places], 0, tl.int64)
    tried = tl.full([VARIANT.places], -1, tl.int32)
    entries, weights, masses, scales, norms = ones, ones, nothing, ones, ones
    depth = tl.full([], 0, tl.int32)
    going = tl.full([], 1, tl.int1)
    while going:
        place = at_index(path, depth, VARIANT)
        row, _, _, bad = load_row(batch, request, place, scale, VARIANT)
        before, weight = at_index(tried, depth, VARIANT), at_index(weights, depth, VARIANT)
        child = child_after(tl.where(bad, -1, above), place, before, VARIANT)
        if child == NO_LANE:
            u = accept_uniform(batch, request, tl.maximum(place - 1, 0), depth, VARIANT)
            going = (depth > 0) & (u >= weight)
            if going:
                depth -= 1
        else:
            tree = (above, token_ids, scales, norms, put_back)
            entry = at_index(entries, depth, VARIANT)
            wanted, drawn, mass, norm = try_child(
                row, entry, batch, kind, request, place, child, before >= 0, tree, VARIANT
            )
            rest = mass + (1.0 - weight)
            possible = (wanted > 0) & (drawn > 0)
            accept = tl.where(possible, tl.minimum(wanted / drawn, 1.0), 0.0)
            scales = put_at(scales, child, tl.where(mass > 0, 1.0 / rest, 0.0), VARIANT)
            norms = put_at(norms, child, norm, VARIANT)
            masses = put_at(masses, depth, mass, VARIANT)
            tried = put_at(tried, depth, child, VARIANT)
            if VARIANT.block:
                weights = put_at(weights, depth, tl.where(mass > 0, mass / rest, 0.0), VARIANT)
                down = accept > 0
            else:
                u = accept_uniform(batch, request, child, depth + 1, VARIANT)
                down = (accept >= 1) | (possible & (u * drawn < wanted))
                accept = accept * 0.0 + 1.0
            if down:
                depth += 1
                path = put_at(path, depth, child.to(tl.int64) + 1, VARIANT)
                entries = put_at(entries, depth, accept, VARIANT)
                weights = put_at(weights, depth, accept, VARIANT)
                masses = put_at(masses, depth, float("nan"), VARIANT)
                tried = put_at(tried, depth, -1, VARIANT)
    return depth, path, entries, masses, tried, scales, norms
