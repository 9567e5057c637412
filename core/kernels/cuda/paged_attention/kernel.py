"""Paged attention as Triton kernels: one program per tile of queries that share a key head, and per range of keys.

The queries of the heads that share a key lie in one tile, so a key is read once for all of them. A batch of few tokens
(decoding, verification) has too few tiles to fill a device; keys are then divided into ranges, attended apart and
joined by their maxima and masses (flash-decoding). Where a range begins and ends follows from its number alone, so that
what a request gives does not depend on its neighbours in such a batch, nor on how long a request may become. Ranges are
short where every request has keys, and grow with the position: a long request has several in every octave.
"""

# ruff: noqa: ANN001, ANN201, PLR0913
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from functools import cache
from itertools import count

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention_spec import AttentionSpec
from ...paged_attention import Pages, TreeMask
from ..launch import ATTENTION, next_power_of_two, registers
from .visible import first_node_of, is_seen, keys_of_tile, placed

MINUS_INF = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
SHORTEST_RANGE = tl.constexpr(256)  # keys; shorter ranges cost more to join than they gain
NUM_SHORTEST = tl.constexpr(16)  # ranges of this length, up to position 4096
PER_OCTAVE = tl.constexpr(8)  # ranges between a position and its double, after that
JOINED_AT_ONCE = tl.constexpr(16)
FEW_TOKENS = 512  # up to this many a batch leaves a device idle
MOST_PARTS = 1 << 14  # of tokens times ranges, each of which leaves fp32 [Hq, Dv] behind
MODES = {"causal": 0, "causal_block": 1, "full_block": 2}


@triton.jit
def keys_of_range(number):
    """The first key of a range, and the one after the last; `bounds_of` on the host."""
    octave = tl.maximum(number - NUM_SHORTEST, 0) // PER_OCTAVE
    doubled = tl.maximum(number - NUM_SHORTEST, 0) % PER_OCTAVE
    length = tl.full([], NUM_SHORTEST * SHORTEST_RANGE // PER_OCTAVE, tl.int32) << octave
    begin = (NUM_SHORTEST * SHORTEST_RANGE << octave) + doubled * length
    is_short = number < NUM_SHORTEST
    begin = tl.where(is_short, number * SHORTEST_RANGE, begin)
    return begin, begin + tl.where(is_short, SHORTEST_RANGE, length)


@triton.jit(
    do_not_specialize=[
        "maxima_ptr", "sums_ptr", "table_ptr", "num_keys_ptr", "cu_queries_ptr", "num_nodes_ptr", "ancestors_ptr",
        "depths_ptr", "tree_width",
    ]
)  # fmt: skip
def attend_pages_kernel(
    query_ptr,
    query_stride,
    keys_ptr,
    keys_stride,
    values_ptr,
    values_stride,
    output_ptr,
    maxima_ptr,
    sums_ptr,
    table_ptr,
    table_width,
    num_keys_ptr,
    cu_queries_ptr,
    sinks_ptr,
    num_nodes_ptr,
    ancestors_ptr,
    depths_ptr,
    tree_width,
    num_kv_heads,
    scale,
    softcap,
    window,
    chunk,
    num_ranges,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MODE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKING: tl.constexpr,
    RANGED: tl.constexpr,
    TREE: tl.constexpr,
):
    """Grid [any, B * Hkv, ranges]. With RANGED the output is fp32 [N, Hq, ranges, Dv] and not yet divided."""
    request, kv_head = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    first_query = tl.load(cu_queries_ptr + request)
    num_queries = tl.load(cu_queries_ptr + request + 1) - first_query
    num_keys = tl.load(num_keys_ptr + request)
    start = num_keys - num_queries
    table_ptr += request.to(tl.int64) * table_width
    first_node = first_node_of(num_nodes_ptr, request, num_keys, TREE)
    ancestors_ptr += request * tree_width
    depths_ptr += request * tree_width
    dims, value_dims = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    for first_row in range(tl.program_id(0) * ROWS, num_queries * GROUP, tl.num_programs(0) * ROWS):
        rows = first_row + tl.arange(0, ROWS)
        real = rows < num_queries * GROUP
        earliest, positions, ancestors = placed(
            start + rows // GROUP, real, start + first_row // GROUP, first_node, ancestors_ptr, depths_ptr, TREE
        )
        tokens, heads = (first_query + rows // GROUP).to(tl.int64), kv_head * GROUP + rows % GROUP

        begin, stop = keys_of_tile(
            first_row, start, earliest, num_keys, window, chunk, GROUP, ROWS, MODE, WINDOWED, CHUNKED
        )
        if RANGED:
            range_begin, range_stop = keys_of_range(tl.program_id(2))
            begin, stop = tl.maximum(begin, range_begin), tl.minimum(stop, range_stop)
        begin = begin // KEYS * KEYS  # tiles of keys lie alike for every query, and so do their sums

        places = tokens * (num_kv_heads * GROUP) + heads
        if RANGED:
            places = places * num_ranges + tl.program_id(2)
        if begin < stop:
            query = tl.load(
                query_ptr + (tokens * query_stride + heads * DIM)[:, None] + dims[None, :],
                mask=real[:, None] & (dims[None, :] < DIM),
                other=0.0,
            )
            maxima = tl.full([ROWS], MINUS_INF, tl.float32)
            sums = tl.full([ROWS], 0.0, tl.float32)
            if SINKING and not RANGED:  # a key without a value; `join_ranges_kernel` adds it to ranges
                maxima = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
                sums = tl.full([ROWS], 1.0, tl.float32)
            total = tl.full([ROWS, PADDED_VALUE_DIM], 0.0, tl.float32)
            for at in range(begin, stop, KEYS):
                key_positions = at + tl.arange(0, KEYS)
                there = key_positions < stop
                block = tl.load(table_ptr + key_positions // BLOCK_SIZE, mask=there, other=0)
                slots = block.to(tl.int64) * BLOCK_SIZE + key_positions % BLOCK_SIZE
                keys = tl.load(
                    keys_ptr + (slots * keys_stride)[None, :] + kv_head * DIM + dims[:, None],
                    mask=there[None, :] & (dims[:, None] < DIM),
                    other=0.0,
                )
                scores = tl.dot(query, keys, input_precision="ieee") * scale
                if CAPPED:
                    scores = softcap * (2.0 * tl.sigmoid(2.0 * (scores / softcap)) - 1.0)
                seen = there[None, :] & is_seen(
                    key_positions[None, :],
                    positions[:, None],
                    start,
                    first_node,
                    ancestors[:, None],
                    depths_ptr,
                    window,
                    chunk,
                    MODE,
                    WINDOWED,
                    CHUNKED,
                    TREE,
                )
                scores = tl.where(seen, scores * LOG2_E, MINUS_INF)
                new_maxima = tl.maximum(maxima, tl.max(scores, 1))
                origin = tl.where(new_maxima == MINUS_INF, 0.0, new_maxima)
                weights = tl.exp2(scores - origin[:, None])
                shrunk = tl.exp2(maxima - origin)
                values = tl.load(
                    values_ptr + (slots * values_stride)[:, None] + kv_head * VALUE_DIM + value_dims[None, :],
                    mask=there[:, None] & (value_dims[None, :] < VALUE_DIM),
                    other=0.0,
                )
                sums = sums * shrunk + tl.sum(weights, 1)
                total = tl.dot(weights.to(values.dtype), values, total * shrunk[:, None], input_precision="ieee")
                maxima = new_maxima

            if RANGED:
                tl.store(maxima_ptr + places, maxima, mask=real)
                tl.store(sums_ptr + places, sums, mask=real)
            else:
                total = total / sums[:, None]
            tl.store(
                output_ptr + (places * VALUE_DIM)[:, None] + value_dims[None, :],
                total.to(output_ptr.dtype.element_ty),
                mask=real[:, None] & (value_dims[None, :] < VALUE_DIM),
            )
        elif RANGED:
            tl.store(maxima_ptr + places, tl.full([ROWS], MINUS_INF, tl.float32), mask=real)


@triton.jit(do_not_specialize=["sums_ptr"])
def join_ranges_kernel(
    totals_ptr,
    maxima_ptr,
    sums_ptr,
    output_ptr,
    sinks_ptr,
    num_heads,
    num_ranges,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    RANGES: tl.constexpr,
    SINKING: tl.constexpr,
):
    """Grid [N * Hq]. What a range without keys left behind is not read, but for its maximum."""
    head = tl.program_id(0).to(tl.int64)
    places, value_dims = tl.arange(0, RANGES), tl.arange(0, PADDED_VALUE_DIM)
    maxima = tl.load(maxima_ptr + head * num_ranges + places, mask=places < num_ranges, other=MINUS_INF)
    sums = tl.load(sums_ptr + head * num_ranges + places, mask=maxima > MINUS_INF, other=0.0)
    top = tl.max(maxima, 0)
    mass = tl.sum(tl.exp2(maxima - top) * sums, 0)
    if SINKING:
        mass += tl.exp2(tl.load(sinks_ptr + head % num_heads).to(tl.float32) * LOG2_E - top)
    output = tl.full([PADDED_VALUE_DIM], 0.0, tl.float32)
    for first in range(0, num_ranges, JOINED_AT_ONCE):
        some = head * num_ranges + first + tl.arange(0, JOINED_AT_ONCE)
        here = first + tl.arange(0, JOINED_AT_ONCE) < num_ranges
        some_maxima = tl.load(maxima_ptr + some, mask=here, other=MINUS_INF)
        weights = tl.exp2(some_maxima - top) / mass
        totals = tl.load(
            totals_ptr + some[:, None] * VALUE_DIM + value_dims[None, :],
            mask=(some_maxima > MINUS_INF)[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        output += tl.sum(totals * weights[:, None], 0)
    output = output.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + head * VALUE_DIM + value_dims, output, mask=value_dims < VALUE_DIM)


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
    """Compute `kernels.paged_attention.attend_pages` by our Triton kernel."""
    num_tokens, num_heads, dim = query.shape
    num_kv_heads, value_dim = values.shape[1:]
    num_requests, group = len(pages.num_keys), num_heads // num_kv_heads
    query = query.contiguous()
    output = query.new_empty(num_tokens, num_heads, value_dim)
    totals = maxima = sums = output
    sinks = output if spec.sinks is None else spec.sinks
    tree = pages.tree or TreeMask(pages.num_keys, pages.num_keys, pages.num_keys)  # which is not read then
    num_queries, num_ranges = pages.max_queries, num_ranges_of(pages.max_keys)
    if num_tokens <= few_tokens(num_ranges):
        num_queries = -(-num_tokens // num_requests)  # a program goes on to the next tile where there are more
    else:
        num_ranges = 1
    if num_ranges > 1:
        totals = query.new_empty(num_tokens, num_heads, num_ranges, value_dim, dtype=torch.float32)
        maxima, sums = totals.new_empty(2, num_tokens, num_heads, num_ranges)
    tile = tile_of(group * num_queries, max(dim, value_dim), query.dtype, tree=pages.tree is not None)
    num_tiles = -(-group * num_queries // tile["ROWS"])
    attend_pages_kernel[(num_tiles, num_requests * num_kv_heads, num_ranges)](
        query,
        query.stride(0),
        keys,
        keys.stride(0),
        values,
        values.stride(0),
        totals,
        maxima,
        sums,
        pages.block_table,
        pages.block_table.stride(0),
        pages.num_keys,
        pages.cu_queries,
        sinks,
        tree.num_nodes,
        tree.ancestors,
        tree.depths,
        tree.ancestors.shape[-1],
        num_kv_heads,
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        spec.chunk or 0,
        num_ranges,
        GROUP=group,
        DIM=dim,
        VALUE_DIM=value_dim,
        PADDED_DIM=padded(dim),
        PADDED_VALUE_DIM=padded(value_dim),
        BLOCK_SIZE=pages.block_size,
        MODE=MODES[pages.mode],
        WINDOWED=spec.window is not None,
        CHUNKED=spec.chunk is not None,
        CAPPED=spec.softcap is not None,
        SINKING=spec.sinks is not None,
        RANGED=num_ranges > 1,
        TREE=pages.tree is not None,
        **tile,
        **ATTENTION,
    )
    if num_ranges > 1:
        join_ranges_kernel[(num_tokens * num_heads,)](
            totals,
            maxima,
            sums,
            output,
            sinks,
            num_heads,
            num_ranges,
            value_dim,
            padded(value_dim),
            next_power_of_two(num_ranges),
            SINKING=spec.sinks is not None,
            num_warps=2,
            **ATTENTION,
        )
    return output


def bounds_of(number: int) -> tuple[int, int]:
    """The first key of a range, and the one after the last."""
    if number < NUM_SHORTEST:
        return number * SHORTEST_RANGE.value, (number + 1) * SHORTEST_RANGE.value
    octave, doubled = divmod(number - NUM_SHORTEST.value, PER_OCTAVE.value)
    begin = NUM_SHORTEST.value * SHORTEST_RANGE.value << octave
    length = begin // PER_OCTAVE.value
    return begin + doubled * length, begin + (doubled + 1) * length


@cache
def num_ranges_of(num_keys: int) -> int:
    """How many ranges so many keys have: one for each 256 up to 4096, then eight for each doubling."""
    return next(number for number in count(1) if bounds_of(number)[0] >= num_keys)


def few_tokens(num_ranges: int) -> int:
    """The largest batch whose keys are divided."""
    return min(FEW_TOKENS, MOST_PARTS // num_ranges)


def tile_of(num_rows: int, dim: int, dtype: torch.dtype, *, tree: bool) -> dict[str, int]:
    """How many query rows and keys a program works on at a time, and how: what the compiler spills nowhere.

    tree: whether there is a mask, which lies in registers too.
    """
    exact, wide = dtype == torch.float32, dim > 128
    rows = 16 if num_rows <= 16 or exact else 32 if num_rows <= 32 or wide else 64
    keys = 16 if exact or (tree and wide) else 32 if wide or rows == 64 or (rows == 32 and dim > 64) else 64
    warps = 8 if (rows == 64 and (tree or dim <= 64)) or (rows == 32 and wide) else 4
    if exact and not wide:
        warps = 2 if dim <= 32 else 8
    tile = {"ROWS": rows, "KEYS": keys, "num_warps": warps, "num_stages": 2}
    return tile if exact else tile | registers(255)


def padded(dim: int) -> int:
    """The width of a tile that holds a head: a power of two, as wide as a product needs."""
    return max(16, next_power_of_two(dim))
