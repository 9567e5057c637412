"""Paged attention as Triton kernels: a program has tiles of queries that share a key head, and parts of their keys.

The queries of the heads that share a key lie in one tile, so a key is read once for all of them. A request with few
queries (decoding, verification) has too few tiles to fill a device; its keys are then dealt out in segments to a fixed
number of parts, attended apart and joined by their maxima and masses (flash-decoding). Which part has a key follows
from its position alone, so what a request gives depends neither on its neighbours nor on how long it may become.
Programs go on from one part or tile to the next: where a batch fills a device there are few, and few of them idle.
"""

# ruff: noqa: ANN001, ANN201, PLR0913
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention import Pages
from ...attention_spec import AttentionSpec
from ..launch import ATTENTION, registers
from .visible import is_seen, keys_of_tile, placed

MINUS_INF = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
SEGMENT = 256  # keys that follow each other in one part; less costs more to join than it gains
PARTS = 32  # of the keys of a request with few queries
FEW_QUERIES = 512  # of requests whose keys are divided: each leaves fp32 [Hq, PARTS, Dv] behind
ENOUGH_PROGRAMS = 1024  # to fill a large device


@triton.constexpr_function
def padded(dim):
    """The width of a tile that holds a head: a power of two, as wide as a product needs."""
    return 1 << max(4, (dim - 1).bit_length())


@triton.jit
def tiles_of_part(part, begin, stop, KEYS: tl.constexpr, SEGMENT: tl.constexpr, PARTS: tl.constexpr):
    """(its first segment, tile of keys to begin with, tile to end before) of a part of the keys from begin to stop."""
    first = begin // SEGMENT
    segment = first + (part + PARTS - first % PARTS) % PARTS
    count = ((stop + SEGMENT - 1) // SEGMENT - segment + PARTS - 1) // PARTS
    last = stop - (segment + (count - 1) * PARTS) * SEGMENT  # keys in the last segment, if no other follows
    tiles = (count - 1) * (SEGMENT // KEYS) + (tl.minimum(last, SEGMENT) + KEYS - 1) // KEYS
    return segment, tl.where(segment == first, begin % SEGMENT // KEYS, 0), tl.where(count > 0, tiles, 0)


@triton.jit
def keys_of(tile, segment, KEYS: tl.constexpr, SEGMENT: tl.constexpr, PARTS: tl.constexpr):
    """The positions [KEYS] of a part's tile; `segment` is its first."""
    segment += tile // (SEGMENT // KEYS) * PARTS
    return segment * SEGMENT + tile % (SEGMENT // KEYS) * KEYS + tl.arange(0, KEYS)


@triton.jit(
    do_not_specialize=[
        "maxima_ptr", "sums_ptr", "table_ptr", "num_keys_ptr", "cu_queries_ptr", "num_nodes_ptr", "ancestors_ptr",
        "depths_ptr", "tree_width", "most_divided", "num_programs",
    ]
)  # fmt: skip
def attend_pages_kernel(
    query_ptr,
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
    most_divided,
    num_programs,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    MODE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid [B * Hkv * num_programs]: other axes end at 65535. With more parts than one it serves requests of at most
    `most_divided` queries, and the output is fp32 [B, most_divided, Hq, parts, Dv] and not yet divided; else it serves
    the others.
    """
    pair, first_piece = tl.program_id(0) // num_programs, tl.program_id(0) % num_programs
    request, kv_head = pair // num_kv_heads, pair % num_kv_heads
    first_query = tl.load(cu_queries_ptr + request)
    num_queries = tl.load(cu_queries_ptr + request + 1) - first_query
    num_keys = tl.load(num_keys_ptr + request)
    start = num_keys - num_queries
    table_ptr += request.to(tl.int64) * table_width
    first_node = num_keys
    if num_nodes_ptr is not None:
        first_node -= tl.load(num_nodes_ptr + request)
        ancestors_ptr += request * tree_width
        depths_ptr += request * tree_width
    dims, value_dims = tl.arange(0, padded(DIM)), tl.arange(0, padded(VALUE_DIM))
    is_served = (num_queries <= most_divided) == (PARTS > 1)
    num_tiles = tl.where(is_served, (num_queries * GROUP + ROWS - 1) // ROWS, 0)
    for number in range(first_piece, num_tiles * PARTS, num_programs):
        first_row, part = number // PARTS * ROWS, number % PARTS
        rows = first_row + tl.arange(0, ROWS)
        real = rows < num_queries * GROUP
        earliest, positions, ancestors = placed(
            start + rows // GROUP, real, start + first_row // GROUP, first_node, ancestors_ptr, depths_ptr
        )
        tokens, heads = (first_query + rows // GROUP).to(tl.int64), kv_head * GROUP + rows % GROUP

        begin, stop = keys_of_tile(first_row, start, earliest, num_keys, window, chunk, GROUP, ROWS, MODE)
        segment, at, tiles = tiles_of_part(part, begin, stop, KEYS, SEGMENT, PARTS)

        places = tokens * (num_kv_heads * GROUP) + heads
        if PARTS > 1:
            slots_of_request = request.to(tl.int64) * most_divided + rows // GROUP
            places = (slots_of_request * (num_kv_heads * GROUP) + heads) * PARTS + part
        if at < tiles:
            query = tl.load(
                query_ptr + (tokens * (num_kv_heads * GROUP * DIM) + heads * DIM)[:, None] + dims[None, :],
                mask=real[:, None] & (dims[None, :] < DIM),
                other=0.0,
            )
            maxima = tl.full([ROWS], MINUS_INF, tl.float32)
            sums = tl.full([ROWS], 0.0, tl.float32)
            if sinks_ptr is not None and PARTS == 1:  # a key without a value; `join_parts_kernel` adds it to parts
                maxima = tl.load(sinks_ptr + heads).to(tl.float32) * LOG2_E
                sums = tl.full([ROWS], 1.0, tl.float32)
            total = tl.full([ROWS, padded(VALUE_DIM)], 0.0, tl.float32)
            coming = keys_of(at, segment, KEYS, SEGMENT, PARTS)
            coming_block = tl.load(table_ptr + coming // BLOCK_SIZE, mask=coming < stop, other=0)
            for tile in range(at, tiles):
                key_positions, block = coming, coming_block
                there = key_positions < stop
                coming = keys_of(tile + 1, segment, KEYS, SEGMENT, PARTS)  # read ahead: their keys wait for the block
                coming_block = tl.load(table_ptr + coming // BLOCK_SIZE, mask=coming < stop, other=0)
                slots = block.to(tl.int64) * BLOCK_SIZE + key_positions % BLOCK_SIZE
                keys = tl.load(
                    keys_ptr + (slots * keys_stride)[None, :] + kv_head * DIM + dims[:, None],
                    mask=there[None, :] & (dims[:, None] < DIM),
                    other=0.0,
                )
                scores = tl.dot(query, keys, input_precision="ieee") * scale
                if softcap is not None:
                    scores = softcap * (2.0 * tl.sigmoid(2.0 * (scores / softcap)) - 1.0)
                seen = is_seen(
                    key_positions, there, positions, start, first_node, ancestors, depths_ptr, window, chunk, MODE
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

            if PARTS > 1:
                tl.store(maxima_ptr + places, maxima, mask=real)
                tl.store(sums_ptr + places, sums, mask=real)
            else:
                total = total / sums[:, None]
            tl.store(
                output_ptr + (places * VALUE_DIM)[:, None] + value_dims[None, :],
                total.to(output_ptr.dtype.element_ty),
                mask=real[:, None] & (value_dims[None, :] < VALUE_DIM),
            )
        elif PARTS > 1:
            tl.store(maxima_ptr + places, tl.full([ROWS], MINUS_INF, tl.float32), mask=real)


@triton.jit(do_not_specialize=["sums_ptr", "cu_queries_ptr", "most_divided"])
def join_parts_kernel(
    totals_ptr,
    maxima_ptr,
    sums_ptr,
    output_ptr,
    sinks_ptr,
    cu_queries_ptr,
    num_heads,
    most_divided,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid [B * most_divided * Hq]. What a part without keys left behind is not read, but for its maximum."""
    place = tl.program_id(0).to(tl.int64)
    head, query = place % num_heads, place // num_heads % most_divided
    request = place // num_heads // most_divided
    first_query = tl.load(cu_queries_ptr + request)
    num_queries = tl.load(cu_queries_ptr + request + 1) - first_query
    if (query < num_queries) & (num_queries <= most_divided):
        parts, value_dims = place * PARTS + tl.arange(0, PARTS), tl.arange(0, padded(VALUE_DIM))
        maxima = tl.load(maxima_ptr + parts)
        some = maxima > MINUS_INF
        sums = tl.load(sums_ptr + parts, mask=some, other=0.0)
        top = tl.max(maxima, 0)
        weights = tl.exp2(maxima - top)
        mass = tl.sum(weights * sums, 0)
        if sinks_ptr is not None:
            mass += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - top)
        inside = value_dims < VALUE_DIM
        totals = tl.load(
            totals_ptr + (parts * VALUE_DIM)[:, None] + value_dims[None, :],
            mask=some[:, None] & inside[None, :],
            other=0.0,
        )
        output = tl.sum(totals * (weights / mass)[:, None], 0).to(output_ptr.dtype.element_ty)
        token = (first_query + query).to(tl.int64)
        tl.store(output_ptr + (token * num_heads + head) * VALUE_DIM + value_dims, output, mask=inside)


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
    """Compute `kernels.attention.attend_pages` by our Triton kernel."""
    (num_tokens, num_heads, _), num_requests = query.shape, len(pages.num_keys)
    query = query.contiguous()
    output = query.new_empty(num_tokens, num_heads, values.shape[2])
    most_divided = most_divided_of(pages)
    if most_divided:
        totals = output.new_empty(num_requests * most_divided, num_heads, PARTS, values.shape[2], dtype=torch.float32)
        maxima, sums = totals.new_empty(2, *totals.shape[:3])
        usual = min(most_divided, -(-num_tokens // num_requests))  # a program goes on to the next tile where more come
        _attend(query, keys, values, (totals, maxima, sums), pages, spec, usual, most_divided, PARTS)
        join_parts_kernel[(totals.shape[:2].numel(),)](
            totals,
            maxima,
            sums,
            output,
            spec.sinks,
            pages.cu_queries,
            num_heads,
            most_divided,
            values.shape[2],
            PARTS,
            num_warps=4,
            **ATTENTION,
        )
    if pages.max_queries > most_divided:
        _attend(query, keys, values, (output, output, output), pages, spec, pages.max_queries, most_divided, 1)
    return output


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    pages: Pages,
    spec: AttentionSpec,
    num_queries: int,
    most_divided: int,
    parts: int,
) -> None:
    """results: totals, maxima and sums of parts. num_queries: of a request, by which the tile is chosen."""
    num_heads, dim, (num_kv_heads, value_dim) = *query.shape[1:], values.shape[1:]
    group, count = num_heads // num_kv_heads, len(pages.num_keys) * num_kv_heads
    tree = pages.tree
    nodes = (None,) * 4 if tree is None else (tree.num_nodes, tree.ancestors, tree.depths, tree.ancestors.shape[1])
    tile = tile_of(group * num_queries, max(dim, value_dim), query.dtype, tree=tree is not None)
    each = num_programs(-(-group * num_queries // tile["ROWS"]) * parts, count)
    attend_pages_kernel[(count * each,)](
        query,
        keys,
        keys.stride(0),
        values,
        values.stride(0),
        *results,
        pages.block_table,
        pages.block_table.stride(0),
        pages.num_keys,
        pages.cu_queries,
        spec.sinks,
        *nodes,
        num_kv_heads,
        spec.scale,
        spec.softcap,
        spec.window,
        spec.chunk,
        most_divided,
        each,
        GROUP=group,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=pages.block_size,
        SEGMENT=SEGMENT,
        MODE=pages.mode,
        PARTS=parts,
        **tile,
        **ATTENTION,
    )


def most_divided_of(pages: Pages) -> int:
    """The most queries of a request whose keys are divided. 0: no request's are."""
    if pages.max_keys <= SEGMENT:
        return 0
    return min(pages.max_queries, FEW_QUERIES // len(pages.num_keys))


def num_programs(num_pieces: int, count: int) -> int:
    """Programs for the tiles and parts of each of `count` requests and key heads. The last pieces may be long, and most
    may be empty.
    """
    return min(num_pieces, max(1, num_pieces // 8, ENOUGH_PROGRAMS // count))


def tile_of(num_rows: int, dim: int, dtype: torch.dtype, *, tree: bool) -> dict[str, int]:
    """How many query rows and keys a program works on at a time, and how: what the compiler spills nowhere.

    tree: whether there is a mask, which lies in registers too.
    """
    exact, wide = dtype == torch.float32, dim > 128
    rows = 16 if num_rows <= 16 or exact else 32 if num_rows <= 32 or wide else 64
    keys = 16 if exact or (tree and wide) else 32 if wide or rows == 64 or (rows == 32 and dim > 64) else 64
    warps = 8 if (rows == 64 and (tree or dim <= 64)) or (rows == 32 and wide) else 4
    if exact:
        warps = 2 if dim <= 32 else 8
    return {"ROWS": rows, "KEYS": keys, "num_warps": warps, "num_stages": 2, **registers(255)}
