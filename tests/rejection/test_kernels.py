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
from specdec.core.kernels.cuda.row_stats import TileStats, draft_stats, row_stats
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


def empty(num_places: int, vocab_size: int, tile: int = TILE) -> TileStats:
    shape = (3, num_places, -(-vocab_size // tile))
    return TileStats(torch.full(shape, 9.0, device=DEVICE), torch.full(shape, 9.0, device=DEVICE), tile)


def assert_same(got: TileStats, want: TileStats) -> None:
    assert torch.equal(got.maxima, want.maxima)
    torch.testing.assert_close(got.sums, want.sums, rtol=1e-6, atol=0, equal_nan=True)


def put(stats: TileStats, at: tuple[int, int], row: Tensor, temperature: Tensor, cutoff: float = -math.inf) -> None:
    """What a row [V] is expected to leave behind, of the tokens at or above a cutoff."""
    tiles = [part.float().cpu() for part in row.split(stats.tile)]
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
        got, want = empty(3, vocab_size), empty(3, vocab_size)
        row_stats(logits, CU_ROWS.to(DEVICE), TEMPERATURE.to(DEVICE), got, skip_last)
        for b, i, row in PLACES:
            if not (skip_last and row + 1 in CU_ROWS):
                put(want, (b, i), logits[row], TEMPERATURE[b])
        assert_same(got, want)


def test_statistics_of_draft_logits_are_made_where_there_are_drafts_of_that_kind() -> None:
    logits = torch.randn(3, 2, 21, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    got, want = empty(2, 21), empty(2, 21)
    lengths, kinds = torch.tensor([2, 1, 2]).to(DEVICE), torch.tensor([2, 2, 1], dtype=torch.uint8).to(DEVICE)
    draft_stats(logits, lengths, kinds, got)
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
    got, got_cutoff = empty(3, 37, tile), torch.full((3, 3), 9.0, device=DEVICE)
    row_stats(logits, CU_ROWS.to(DEVICE), temperature, got)
    filter_rows(logits, CU_ROWS.to(DEVICE), temperature, filters, got, got_cutoff)
    want, want_cutoff = empty(3, 37, tile), torch.full((3, 3), 9.0, device=DEVICE)
    for b, i, row in PLACES:
        want_cutoff[b, i], whole = -math.inf, logits[row, None].float()
        top, scale = whole.amax(1, keepdim=True), scale_of(temperature[b]).float().view(1, 1)
        if temperature[b] > 0 and top.isfinite():
            weights = ((whole - top) * scale).exp2().unsqueeze(2)
            want_cutoff[b, i] = apply_filters(whole, top, scale, filters.part(slice(b, b + 1)), weights)
        put(want, (b, i), logits[row], temperature[b], float(want_cutoff[b, i]))
    assert_same(got, want)
    torch.testing.assert_close(got_cutoff, want_cutoff, rtol=2e-7 if min_p else 0, atol=0)


def test_value_below_the_cutoff_that_shares_its_key_is_no_survivor() -> None:
    """Ten bf16 logits of 1 have the key of the cutoff of min-p, 1.003; their mass would lower the edge of top-p."""
    logits = torch.tensor([[3.0, 2.0, *[1.0] * 10]], dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    filters = FilterRows(torch.zeros(1, dtype=torch.int64, device=DEVICE), 0.6 * one, math.exp(-1.997) * one)
    stats = TileStats(torch.empty(1, 1, 1, device=DEVICE), torch.empty(1, 1, 1, device=DEVICE), TILE)
    cu_rows, cutoff = torch.tensor([0, 1], device=DEVICE), torch.empty(1, 1, device=DEVICE)
    row_stats(logits, cu_rows, one, stats)
    filter_rows(logits, cu_rows, one, filters, stats, cutoff)
    assert cutoff.tolist() == [[3.0]]
