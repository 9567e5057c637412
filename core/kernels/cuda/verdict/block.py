"""Device functions of the residual of a stop, and of the block rule, which looks for its stop from the end.

With P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)), the step stops at the last place i whose own uniform is below
h_i. There h_i = M_i / (M_i + 1 - P_i) with M_i = sum (P_i p_i - q_i)+, and h_i = P_i where the drafts end. As
h_i <= P_i, a place whose uniform is not below P_i needs no pass over the vocabulary. The token follows
(P_i p_i - q_i)+, or p where the drafts end. `rejection.tree` is the plain form.
"""

# ruff: noqa: ANN001, ANN201, RUF059
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl

from .residual import distribution_at, load_residual, residual_tile
from .standard import NO_PROPOSAL, accept_uniform, at_index, index_of, load_row, probs_of


@triton.jit
def thinned(row, survival, VARIANT: tl.constexpr):
    """The row with p times survival for p, which differ in block verification only."""
    row_ptr, top, scale, cutoff, mass = row
    if VARIANT.block:
        mass = mass / survival
    return row_ptr, top, scale, cutoff, mass


@triton.jit
def residual_at(batch, request, place):
    """Where the tile masses of the residual of a place are."""
    return batch.scratch.residual + index_of(batch, request, place) * batch.rows.num_tiles


@triton.jit
def share_residual(batch, kind, request, place, scale, survival, split, VARIANT: tl.constexpr):
    """Compute this program's tile masses of the residual (survival p - q)+."""
    row, maxima, masses, bad = load_row(batch, request, place, scale, VARIANT)
    row = thinned(row, survival, VARIANT)
    distribution = distribution_at(batch, kind, request, place, VARIANT)
    sums_ptr = residual_at(batch, request, place)
    for tile in range(split, batch.rows.num_tiles, tl.num_programs(0)):
        residual = residual_tile(row, batch, distribution, kind, tile, VARIANT.tile)
        tl.store(sums_ptr + tile, tl.sum(residual, 0))


@triton.jit
def survivals_of(batch, request, length, scale, kind, lead, VARIANT: tl.constexpr):
    """(P_0 .. P_n fp64 [places], n) of block verification, n being the place where the drafts that can be verified end.

    The leading program reports every verified draft; what lies beyond the stop is overwritten there.
    """
    lanes = tl.arange(0, VARIANT.places)
    survivals = tl.full([VARIANT.places], 1.0, tl.float64)
    survival = tl.full([], 1.0, tl.float64)
    last = tl.full([], 0, tl.int32)
    going = length > 0
    while going:
        drafted = tl.load(batch.requests.token_ids + request * batch.requests.token_stride + last)
        row, maxima, masses, bad = load_row(batch, request, last, scale, VARIANT)
        going = (drafted != NO_PROPOSAL) & (bad == 0)
        if going:
            prob, distribution = probs_of(row, batch, kind, drafted, request, last, VARIANT)
            ratio = prob / distribution
            ratio = tl.where((prob > 0) & (distribution != 0) & (ratio == ratio), ratio, 0.0)
            survival = tl.where(survival > 0, tl.minimum(survival * ratio, 1.0), 0.0)
            if lead:
                tl.store(batch.outputs.token_ids + index_of(batch, request, last), drafted)
            last += 1
            survivals = tl.where(lanes == last, survival, survivals)
            going = last < length
    return survivals, last


@triton.jit
def block_is_open(batch, request, survivals, last, VARIANT: tl.constexpr):
    """Whether the uniform of the last place leaves the stop to the places before it."""
    uniform = accept_uniform(batch, request, tl.maximum(last - 1, 0), last, VARIANT)
    return (last > 0) & (uniform >= at_index(survivals, last, VARIANT))


@triton.jit
def may_stop_at(batch, request, place, survivals, VARIANT: tl.constexpr):
    """(whether a place before the last may be the stop, its uniform, its survival); as h_i <= P_i, others need no
    pass.
    """
    uniform = accept_uniform(batch, request, tl.maximum(place - 1, 0), place, VARIANT)
    survival = at_index(survivals, place, VARIANT)
    return (place == 0) | (uniform < survival), uniform, survival


@triton.jit
def share_open_places(batch, kind, request, survivals, last, scale, split, VARIANT: tl.constexpr):
    """Compute this program's tile masses at every place that may be the stop. All must arrive before it is known."""
    for place in range(last):
        possible, uniform, survival = may_stop_at(batch, request, place, survivals, VARIANT)
        if possible:
            share_residual(batch, kind, request, place, scale, survival, split, VARIANT)


@triton.jit
def block_mass(batch, kind, request, place, scale, survival, VARIANT: tl.constexpr):
    """M_i, the mass of (P_i p_i - q_i)+, whose tile masses are in the scratch memory afterwards: already, if programs
    share the request.
    """
    if not VARIANT.shared:
        share_residual(batch, kind, request, place, scale, survival, 0, VARIANT)
    tl.debug_barrier()
    return tl.sum(load_residual(residual_at(batch, request, place), batch.rows.num_tiles, VARIANT), 0)


@triton.jit
def stop_of_block(batch, kind, request, survivals, last, scale, VARIANT: tl.constexpr):
    """(stop, P there): the last place whose uniform accepts, found from the end; place 0 needs no uniform."""
    tl.debug_barrier()
    stop = tl.full([], -1, tl.int32)
    at_stop = tl.full([], 1.0, tl.float64)
    place = last - 1
    while stop < 0:
        possible, uniform, survival = may_stop_at(batch, request, place, survivals, VARIANT)
        if possible:
            mass = block_mass(batch, kind, request, place, scale, survival, VARIANT)
            if (place == 0) | (uniform * (mass + 1.0 - survival) < mass):
                stop = place
                at_stop = survival
        place -= 1
    return stop, at_stop
