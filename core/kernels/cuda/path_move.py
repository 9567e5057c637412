"""Moving the keys and values of accepted nodes as a Triton kernel: one launch for all layers.

A program moves one request's path in one stored tensor, node after node. Nodes come in rising order and none moves
behind its place, so what a later one reads was not written yet.
"""

# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..trees import Paths
from .launch import STREAMING

UNIT = 2
"""Bytes of what is copied at a time: those of the smallest number that a cache stores."""
WIDTH = 1024


@triton.jit
def slot_of(block_table_ptr, position, BLOCK_SIZE: tl.constexpr):
    return tl.load(block_table_ptr + position // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit(do_not_specialize=["table_ptr", "places_ptr", "first_ptr", "block_table_ptr", "num_places", "table_width"])
def move_paths_kernel(
    table_ptr, places_ptr, first_ptr, block_table_ptr, num_places, table_width,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid [B, stored tensors]."""
    request, stored = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stored_ptr = tl.load(table_ptr + 2 * stored).to(tl.pointer_type(tl.int16))
    size = tl.load(table_ptr + 2 * stored + 1) // UNIT
    first = tl.load(first_ptr + request).to(tl.int64)
    block_table_ptr += request * table_width
    for depth in range(1, num_places):
        place = tl.load(places_ptr + request * num_places + depth)
        if place > depth:
            source = slot_of(block_table_ptr, first + place - 1, BLOCK_SIZE) * size
            destination = slot_of(block_table_ptr, first + depth - 1, BLOCK_SIZE) * size
            for at in range(0, size, WIDTH):
                lanes = at + tl.arange(0, WIDTH)
                values = tl.load(stored_ptr + source + lanes, mask=lanes < size)
                tl.store(stored_ptr + destination + lanes, values, mask=lanes < size)


def move_paths(stored: Sequence[Tensor], table: Tensor, paths: Paths) -> None:
    """Move the accepted paths in one launch."""
    count, num_places = paths.places.shape
    move_paths_kernel[(count, len(stored))](
        table,
        paths.places,
        paths.first,
        paths.block_table,
        num_places,
        paths.block_table.shape[1],
        paths.block_size,
        UNIT,
        WIDTH,
        **STREAMING,
    )
