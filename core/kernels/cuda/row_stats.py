"""Maximum and mass of every tile of the logits rows: the one pass over the vocabulary that verification needs.

Triton kernels with one program per tile, 128-bit loads, eight bytes out.
"""

# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.sdk.distribution_kind import DistributionKind

from .launch import STREAMING
from .row_tiles import LOG2_E, load_tile, row_scale, tile_stats
from .verdict import DenseLogits, Rows

DENSE_LOGITS = tl.constexpr(int(DistributionKind.DENSE_LOGITS))


@triton.jit(do_not_specialize=["cu_rows_ptr", "temperature_ptr", "num_places"])
def row_stats_kernel(rows, cu_rows_ptr, temperature_ptr, num_places, TILE: tl.constexpr, SKIP_LAST: tl.constexpr):
    """Grid [tiles, places, B]."""
    tile, request = tl.program_id(0), tl.program_id(2)
    place = request.to(tl.int64) * num_places + tl.program_id(1)
    row = tl.load(cu_rows_ptr + request) + tl.program_id(1)
    if row + SKIP_LAST >= tl.load(cu_rows_ptr + request + 1):
        return
    scale = row_scale(tl.load(temperature_ptr + request))
    top, total = tile_stats(load_tile(rows.logits + row * rows.stride, tile, rows.vocab_size, TILE), scale)
    tl.store(rows.maxima + place * rows.num_tiles + tile, top)
    tl.store(rows.sums + place * rows.num_tiles + tile, total)


@triton.jit(do_not_specialize=["lengths_ptr", "kinds_ptr", "num_places"])
def draft_stats_kernel(drafts, lengths_ptr, kinds_ptr, num_places, TILE: tl.constexpr):
    """Grid [tiles, K, B]."""
    tile, draft, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = request.to(tl.int64) * num_places + draft
    if (draft >= tl.load(lengths_ptr + request)) | (tl.load(kinds_ptr + request) != DENSE_LOGITS):
        return
    top, total = tile_stats(load_tile(drafts.table + place * drafts.size, tile, drafts.size, TILE), LOG2_E)
    tl.store(drafts.maxima + place * drafts.num_tiles + tile, top)
    tl.store(drafts.sums + place * drafts.num_tiles + tile, total)


def row_stats(rows: Rows, cu_rows: Tensor, temperature: Tensor, tile: int, skip_last: bool = False) -> None:
    """Fill the statistics of place i of request b with those of logits row cu_rows[b] + i, whatever is cut off.

    cu_rows int64 [B + 1]; temperature float32 [B]. Places without a row are left as they are, and with skip_last the
    last row of each request too.
    """
    num_requests, num_places, num_tiles = rows.maxima.shape
    if num_places > skip_last:
        grid = num_tiles, num_places - skip_last, num_requests
        row_stats_kernel[grid](rows, cu_rows, temperature, num_places, tile, skip_last, **STREAMING)


def draft_stats(drafts: DenseLogits, lengths: Tensor, kinds: Tensor, tile: int) -> None:
    """Fill the statistics of draft logits of unit temperature: lengths[b] rows of requests whose kind is that of
    logits.
    """
    num_requests, num_places, num_tiles = drafts.maxima.shape
    draft_stats_kernel[(num_tiles, num_places, num_requests)](drafts, lengths, kinds, num_places, tile, **STREAMING)
