"""Each Triton kernel gives what PyTorch computes of the same rows.

Interpreted kernels take tens of milliseconds per program, so the rows are few and the tiles tiny. The unmarked tests
cover full and ragged tiles, every kind of bad row, greedy rows and each filter alone and with the others.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.cuda.row_filter import filter_rows
from specdec.core.kernels.cuda.row_stats import draft_stats, row_stats
from specdec.core.kernels.cuda.verdict import DenseLogits, Rows
from specdec.core.kernels.filters import FilterRows, apply_filters
from specdec.core.kernels.row_distribution import scale_of

from .interpreted import DEVICE, quiet

pytestmark = quiet
TILE = 16
CU_ROWS = torch.tensor([0, 2, 2, 5])
TEMPERATURE = torch.tensor([0.7, 1.0, 1.3])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLACES = [(0, 0, 0), (0, 1, 1), (2, 0, 2), (2, 1, 3), (2, 2, 4)]  # request, place, row


def rows(vocab_size: int, dtype: torch.dtype, bad: bool) -> Tensor:
    g = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(5, vocab_size, generator=g)
    logits[4, 16:] = -math.inf
    if bad:
        logits[0, 1], logits[1], logits[2, -1] = math.nan, -math.inf, math.inf
        logits[3, :16] = math.nan
    return logits.to(dtype).to(DEVICE)


def empty(logits: Tensor, tile: int = TILE) -> Rows:
    num_tiles = -(-logits.shape[1] // tile)
    maxima, sums, cutoff = (torch.full((3, 3, size), 9.0, device=DEVICE) for size in (num_tiles, num_tiles, 1))
    return Rows(logits, logits.stride(0), maxima, sums, cutoff[..., 0], logits.shape[1], num_tiles)


def assert_same(got: Rows | DenseLogits, want: Rows | DenseLogits) -> None:
    assert torch.equal(got.maxima, want.maxima)
    torch.testing.assert_close(got.sums, want.sums, rtol=1e-6, atol=0, equal_nan=True)


def put(
    stats: Rows | DenseLogits,
    at: tuple[int, int],
    row: Tensor,
    temperature: Tensor,
    cutoff: float = -math.inf,
    size: int = TILE,
) -> None:
    """What a row [V] is expected to leave behind, of the tokens at or above a cutoff. `size`: tokens of a tile."""
    tiles = [part.float().cpu() for part in row.split(size)]
    for i, tile in enumerate(tiles):
        top = tile[~tile.isnan()].max() if (~tile.isnan()).any() else torch.tensor(-math.inf)
        weights = ((tile - (0 if top == -math.inf else top)) * scale_of(temperature).float()).exp2()
        stats.maxima[*at, i], stats.sums[*at, i] = top, weights[~(tile < cutoff)].sum()


@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
@pytest.mark.parametrize("vocab_size", [32, 37])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_statistics(dtype: torch.dtype, vocab_size: int, bad: bool) -> None:
    logits = rows(vocab_size, dtype, bad)
    for skip_last in (False, True):
        got, want = empty(logits), empty(logits)
        row_stats(got, CU_ROWS.to(DEVICE), TEMPERATURE.to(DEVICE), TILE, skip_last)
        for b, i, row in PLACES:
            if not (skip_last and row + 1 in CU_ROWS):
                put(want, (b, i), logits[row], TEMPERATURE[b])
        assert_same(got, want)


def test_statistics_of_draft_logits_are_made_where_there_are_drafts_of_that_kind() -> None:
    logits = torch.randn(3, 2, 21, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    got, want = (DenseLogits(logits, 21, *torch.full((2, 3, 2, 2), 9.0, device=DEVICE), 2) for _ in range(2))
    lengths, kinds = torch.tensor([2, 1, 2]).to(DEVICE), torch.tensor([2, 2, 1], dtype=torch.uint8).to(DEVICE)
    draft_stats(got, lengths, kinds, TILE)
    for at in ((0, 0), (0, 1), (1, 0)):
        put(want, at, logits[at], torch.ones(()))
    assert_same(got, want)


FILTERS = {
    "min_p": (0, 1.0, 0.05),
    "top_k": (7, 1.0, 0.0),
    "top_k_of_many": (30, 1.0, 0.0),
    "top_p": (0, 0.8, 0.0),
    "top_p_of_nothing": (0, 0.0, 0.0),
    "all": (9, 0.9, 0.02),
    "off": (0, 1.0, 0.0),
}
SLICE = {("all", torch.float32, TILE), ("top_k", torch.bfloat16, TILE), ("top_p", torch.bfloat16, 64)}
SLICE |= {("all", torch.bfloat16, 64), ("min_p", torch.float16, TILE)}
FILTER_CASES = [
    pytest.param(
        name, dtype, tile, marks=() if (name, dtype) in SLICE else pytest.mark.full, id=f"{name}-{dtype}-{tile}"
    )
    for name in FILTERS
    for dtype in DTYPES
    for tile in (TILE, 64)
]


@pytest.mark.parametrize(("name", "dtype", "tile"), FILTER_CASES)
def test_row_filters(name: str, dtype: torch.dtype, tile: int) -> None:
    """Exactly the same cutoffs: a search that ends a neighbour too early keeps or drops a token.

    Three programs share a row of three tiles, one has a row of one tile to itself.
    """
    logits = rows(37, dtype, bad=name == "all")
    top_k, top_p, min_p = FILTERS[name]
    filters = FilterRows(
        torch.tensor([top_k, 0, 0 if name == "all" else top_k]).to(DEVICE),
        torch.tensor([top_p] * 3).to(DEVICE),
        torch.tensor([min_p] * 3).to(DEVICE),
    )
    temperature = torch.tensor([0.7, 1.0, 0.0 if name == "off" else 1.3]).to(DEVICE)
    got, want = empty(logits, tile), empty(logits, tile)
    row_stats(got, CU_ROWS.to(DEVICE), temperature, tile)
    filter_rows(got, CU_ROWS.to(DEVICE), temperature, filters, tile)
    for b, i, row in PLACES:
        want.cutoff[b, i], whole = -math.inf, logits[row, None].float()
        top, scale = whole.amax(1, keepdim=True), scale_of(temperature[b]).float().view(1, 1)
        if temperature[b] > 0 and top.isfinite():
            weights = ((whole - top) * scale).exp2().unsqueeze(2)
            want.cutoff[b, i] = apply_filters(whole, top, scale, filters.part(slice(b, b + 1)), weights)
        put(want, (b, i), logits[row], temperature[b], float(want.cutoff[b, i]), tile)
    assert_same(got, want)
    torch.testing.assert_close(got.cutoff, want.cutoff, rtol=2e-7 if min_p else 0, atol=0)


def test_value_below_the_cutoff_that_shares_its_key_is_no_survivor() -> None:
    """Ten bf16 logits of 1 have the key of the cutoff of min-p, 1.003; their mass would lower the edge of top-p."""
    logits = torch.tensor([[3.0, 2.0, *[1.0] * 10]], dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    filters = FilterRows(torch.zeros(1, dtype=torch.int64, device=DEVICE), 0.6 * one, math.exp(-1.997) * one)
    rows, cu_rows = empty(logits), torch.tensor([0, 1], device=DEVICE)
    rows = rows._replace(maxima=rows.maxima[:1, :1], sums=rows.sums[:1, :1])
    row_stats(rows, cu_rows, one, TILE)
    filter_rows(rows, cu_rows, one, filters, TILE)
    assert rows.cutoff[0, 0] == 3.0
