"""Each Triton kernel gives what its plain torch form gives.

Interpreted kernels take tens of milliseconds per program, so the rows are few and the tiles tiny. The unmarked tests
cover full and ragged tiles, every kind of bad row, greedy rows and each filter alone and with the others.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.cuda.row_filter import kernel as filter_kernel
from specdec.core.kernels.cuda.row_stats import TileStats
from specdec.core.kernels.cuda.row_stats import kernel as stats_kernel
from specdec.core.kernels.filters import FilterRows

from . import naive_filters as filter_naive
from . import naive_stats as stats_naive
from .interpreted import DEVICE, quiet

pytestmark = quiet
TILE = 16
CU_ROWS = torch.tensor([0, 2, 2, 5])
TEMPERATURE = torch.tensor([0.7, 1.0, 1.3])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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


@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
@pytest.mark.parametrize("vocab_size", [32, 37])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_statistics(dtype: torch.dtype, vocab_size: int, bad: bool) -> None:
    logits = rows(vocab_size, dtype, bad)
    for skip_last in (False, True):
        got, want = empty(3, vocab_size), empty(3, vocab_size)
        for function, stats in ((stats_kernel.row_stats, got), (stats_naive.row_stats, want)):
            function(logits, CU_ROWS.to(DEVICE), TEMPERATURE.to(DEVICE), stats, skip_last)
        assert_same(got, want)


def test_statistics_of_draft_logits_are_made_where_there_are_drafts_of_that_kind() -> None:
    logits = torch.randn(3, 2, 21, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    got, want = empty(2, 21), empty(2, 21)
    lengths, kinds = torch.tensor([2, 1, 2]).to(DEVICE), torch.tensor([2, 2, 1], dtype=torch.uint8).to(DEVICE)
    for function, stats in ((stats_kernel.draft_stats, got), (stats_naive.draft_stats, want)):
        function(logits, lengths, kinds, 2, stats)
    assert_same(got, want)
    assert (got.sums[2] == 9).all()
    assert (got.sums[1, 1] == 9).all()


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
    results = []
    for stats_of, function in (
        (stats_kernel.row_stats, filter_kernel.filter_rows),
        (stats_naive.row_stats, filter_naive.filter_rows),
    ):
        stats, cutoff = empty(3, 37, tile), torch.full((3, 3), 9.0, device=DEVICE)
        stats_of(logits, CU_ROWS.to(DEVICE), temperature, stats)
        function(logits, CU_ROWS.to(DEVICE), temperature, filters, stats, cutoff)
        results.append((stats, cutoff))
    (got, got_cutoff), (want, want_cutoff) = results
    assert_same(got, want)
    torch.testing.assert_close(got_cutoff, want_cutoff, rtol=2e-7 if min_p else 0, atol=0)


def test_value_below_the_cutoff_that_shares_its_key_is_no_survivor() -> None:
    """Ten bf16 logits of 1 have the key of the cutoff of min-p, 1.003; their mass would lower the edge of top-p."""
    logits = torch.tensor([[3.0, 2.0, *[1.0] * 10]], dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    filters = FilterRows(torch.zeros(1, dtype=torch.int64, device=DEVICE), 0.6 * one, math.exp(-1.997) * one)
    stats = TileStats(torch.empty(1, 1, 1, device=DEVICE), torch.empty(1, 1, 1, device=DEVICE), TILE)
    cu_rows, cutoff = torch.tensor([0, 1], device=DEVICE), torch.empty(1, 1, device=DEVICE)
    stats_kernel.row_stats(logits, cu_rows, one, stats)
    filter_kernel.filter_rows(logits, cu_rows, one, filters, stats, cutoff)
    assert cutoff.tolist() == [[3.0]]
