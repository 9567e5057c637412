"""Device functions of paged attention: which keys a query sees, by its mode, its window and its tree."""

# ruff: noqa: ANN001, ANN201, PLR0913
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of_tile(
    first_row, start, earliest, num_keys, window, chunk, GROUP: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr
):
    """The first key that any query of a tile sees, and the one after the last. earliest: the first query's position."""
    begin, stop = start * 0, num_keys
    if MODE != "full_block":
        stop = tl.minimum(num_keys, start + (first_row + ROWS - 1) // GROUP + 1)
    if window is not None:
        first = start - window
        if MODE == "causal":
            first = earliest - window + 1
        begin = tl.maximum(first, 0)
    if chunk is not None:
        begin = tl.maximum(begin, earliest // chunk * chunk)
    return begin, stop


@triton.jit
def placed(slots, real, earliest, first_node, ancestors_ptr, depths_ptr):
    """(position of the first query, positions of all, their paths as bits) of queries that are the keys `slots`."""
    positions, ancestors = slots, slots
    if depths_ptr is not None:
        in_tree = real & (slots >= first_node)
        earliest = tl.minimum(earliest, first_node)
        ancestors = tl.load(ancestors_ptr + slots - first_node, mask=in_tree, other=0)
        depths = tl.load(depths_ptr + slots - first_node, mask=in_tree, other=0)
        positions = tl.where(in_tree, first_node - 1 + depths, slots)
    return earliest, positions, ancestors


@triton.jit
def is_seen(key, there, query, start, first_node, ancestors, depths_ptr, window, chunk, MODE: tl.constexpr):
    """Whether queries [ROWS] see keys [KEYS] that are there, by their positions: [ROWS, KEYS]. `start` is that of the
    pass's first query.

    Of the nodes of a tree a query sees those on its path.
    """
    key, there, query, ancestors = key[None, :], there[None, :], query[:, None], ancestors[:, None]
    seen = there
    if MODE != "full_block":
        seen = key <= query
    if depths_ptr is not None:
        node = tl.minimum(tl.maximum(key - first_node, 0), 63)
        seen = tl.where(key < first_node, seen, ((ancestors >> node) & 1) == 1)
        if window is not None or chunk is not None:
            in_tree = there & (key >= first_node)
            depth = tl.load(depths_ptr + node, mask=in_tree, other=0)
            key = tl.where(in_tree, first_node - 1 + depth, key)
    if window is not None:
        seen = seen & (key > query - window if MODE == "causal" else key >= start - window)
    if chunk is not None:
        seen = seen & (key >= query // chunk * chunk)
    return seen & there
