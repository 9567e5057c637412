"""Maximum and mass of every tile of the logits rows: the one pass over the vocabulary that verification needs.

Triton kernels with one program per tile, 128-bit loads, eight bytes out.
"""

# ruff: noqa: ANN001, ANN201, PLR0913
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from specdec.sdk.distribution_kind import DistributionKind

from .launch import STREAMING
from .row_tiles import LOG2_E, load_tile, row_scale, tile_stats

DENSE_LOGITS = tl.constexpr(int(DistributionKind.DENSE_LOGITS))


@dataclass(frozen=True)
class TileStats:
    """What is known of each row after one pass, by the place of the row in the padded batch."""

    maxima: Tensor  # [B, places, tiles] float32, NaN not counting
    sums: Tensor  # [B, places, tiles] float32, of exp2((logit - tile maximum) * scale); NaN for NaN or +inf
    tile: int  # tokens per tile, a power of two


@triton.jit(do_not_specialize=["cu_rows_ptr", "temperature_ptr", "num_places"])
def row_stats_kernel(
    logits_ptr,
    row_stride,
    cu_rows_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    vocab_size,
    num_places,
    num_tiles,
    TILE: tl.constexpr,
    SKIP_LAST: tl.constexpr,
):
    """Grid [tiles, places, B]."""
    tile, request = tl.program_id(0), tl.program_id(2)
    place = request.to(tl.int64) * num_places + tl.program_id(1)
    row = tl.load(cu_rows_ptr + request) + tl.program_id(1)
    if row + SKIP_LAST >= tl.load(cu_rows_ptr + request + 1):
        return
    scale = row_scale(tl.load(temperature_ptr + request))
    top, total = tile_stats(load_tile(logits_ptr + row * row_stride, tile, vocab_size, TILE), scale)
    tl.store(maxima_ptr + place * num_tiles + tile, top)
    tl.store(sums_ptr + place * num_tiles + tile, total)


@triton.jit(do_not_specialize=["lengths_ptr", "kinds_ptr", "num_places"])
def draft_stats_kernel(
    logits_ptr,
    lengths_ptr,
    kinds_ptr,
    maxima_ptr,
    sums_ptr,
    vocab_size,
    num_places,
    num_tiles,
    TILE: tl.constexpr,
):
    """Grid [tiles, K, B]."""
    tile, draft, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = request.to(tl.int64) * num_places + draft
    if (draft >= tl.load(lengths_ptr + request)) | (tl.load(kinds_ptr + request) != DENSE_LOGITS):
        return
    row_ptr = logits_ptr + place * vocab_size
    top, total = tile_stats(load_tile(row_ptr, tile, vocab_size, TILE), LOG2_E)
    tl.store(maxima_ptr + place * num_tiles + tile, top)
    tl.store(sums_ptr + place * num_tiles + tile, total)


def row_stats(logits: Tensor, cu_rows: Tensor, temperature: Tensor, stats: TileStats, skip_last: bool = False) -> None:
    """Fill stats for place i of request b with those of logits row cu_rows[b] + i.

    logits [R, V]; cu_rows int64 [B + 1]; temperature float32 [B]. Places without a row are left as they are, and
    with skip_last the last row of each request too.
    """
    num_requests, num_places, num_tiles = stats.maxima.shape
    if num_places == skip_last:
        return
    row_stats_kernel[(num_tiles, num_places - skip_last, num_requests)](
        logits,
        logits.stride(0),
        cu_rows,
        temperature,
        stats.maxima,
        stats.sums,
        logits.shape[1],
        num_places,
        num_tiles,
        stats.tile,
        skip_last,
        **STREAMING,
    )


def draft_stats(logits: Tensor, lengths: Tensor, kinds: Tensor, stats: TileStats) -> None:
    """Fill the statistics of draft logits [B, K, Vd] of unit temperature: lengths[b] rows of requests
    whose kind is that of logits. Logits are contiguous.
    """
    num_requests, num_places, num_tiles = stats.maxima.shape
    draft_stats_kernel[(num_tiles, num_places, num_requests)](
        logits,
        lengths,
        kinds,
        stats.maxima,
        stats.sums,
        logits.shape[2],
        num_places,
        num_tiles,
        stats.tile,
        **STREAMING,
    )
