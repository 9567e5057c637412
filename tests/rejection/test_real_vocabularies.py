"""What only shows in real vocabularies and small caches: parts of a batch, columns, fat tails, exact boundaries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.core.kernels import row_distribution as row_distribution_module
from specdec.core.kernels.cuda.row_filter import filter_rows
from specdec.core.kernels.cuda.row_stats import row_stats
from specdec.core.kernels.cuda.verdict import Rows
from specdec.core.kernels.filters import FilterRows, apply_filters, largest
from specdec.core.kernels.pick import empty_tiles
from specdec.core.kernels.row_distribution import LOG2_E, RowDistribution, row_distribution, scale_of
from specdec.testing.rejection.reference import Params, target_distribution

from .interpreted import DEVICE, quiet

LLAMA, QWEN = 128_256, 151_936
MIXED = (Params(), Params(0.7, top_k=50), Params(1.2, top_p=0.9), Params(0.9, min_p=0.02), Params(1.1, 300, 0.95, 0.01))


def filters_of(params: tuple[Params, ...]) -> FilterRows:
    return FilterRows(
        torch.tensor([each.top_k for each in params]),
        torch.tensor([each.top_p for each in params]),
        torch.tensor([each.min_p for each in params]),
    )


def mixed_distribution(logits: Tensor) -> RowDistribution:
    return row_distribution(
        logits, scale_of(torch.tensor([each.temperature for each in MIXED], dtype=torch.float64)), filters_of(MIXED)
    )


def of_mixed(vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return 3 * torch.randn(len(MIXED), vocab_size, generator=torch.Generator().manual_seed(vocab_size), dtype=dtype)


def probs_of(distribution: RowDistribution) -> Tensor:
    return distribution.probs(torch.arange(len(distribution.weights))).flatten(1)[:, : distribution.vocab_size]


@pytest.mark.parametrize("vocab_size", [LLAMA, QWEN])
def test_every_row_of_a_real_vocabulary_takes_its_own_filters(vocab_size: int) -> None:
    """A part of the batch fills the cache: the second row is in the second part."""
    logits = of_mixed(vocab_size, torch.float64)
    assert row_distribution_module.rows_in_cache(vocab_size, logits) == 1
    got, want = (
        probs_of(mixed_distribution(logits)),
        [target_distribution(*each) for each in zip(logits, MIXED, strict=True)],
    )
    for row, distribution in zip(got, want, strict=True):
        assert torch.equal(row > 0, distribution > 0)
        assert float((row - distribution).abs().sum()) / 2 <= 1e-12


@pytest.mark.parametrize("rows_at_once", [1, 2, 3])
def test_the_size_of_the_cache_changes_no_bit(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = of_mixed(300)
    logits[3, 7] = torch.nan
    whole = mixed_distribution(logits)
    monkeypatch.setattr(row_distribution_module, "LOGITS_IN_CACHE", 300 * rows_at_once)
    parts = mixed_distribution(logits)
    assert torch.equal(parts.weights, whole.weights)
    assert torch.equal(parts.cdf, whole.cdf)
    assert parts.bad is not None
    assert parts.bad.tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("vocab_size", [LLAMA, QWEN])
@pytest.mark.parametrize("count", [1, 64, 500, 512])
def test_the_largest_of_a_real_vocabulary_are_the_largest(vocab_size: int, count: int) -> None:
    """They lie in as many columns as there are, or all in one, or at the ragged end."""
    spread = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(count))
    together, ragged = spread.clone(), spread.clone()
    together[0, 5 :: vocab_size // 64] += 50  # one column: every so many tokens
    ragged[0, -20:] += 50
    for values in (spread, together, ragged):
        assert torch.equal(largest(values, count), values.topk(count).values)


def edges(scaled: list[float], top_p: list[float]) -> list[float]:
    """The cutoffs of one row of log2 weights under several top-p."""
    logits = torch.tensor([scaled] * len(top_p))
    weights = empty_tiles(*logits.shape, logits)
    weights.flatten(1)[:, : logits.shape[1]] = logits.exp2()
    rows = FilterRows(torch.zeros(len(top_p), dtype=torch.int64), torch.tensor(top_p), torch.zeros(len(top_p)))
    return apply_filters(logits, torch.zeros(len(top_p), 1), torch.ones(len(top_p), 1), rows, weights)[:, 0].tolist()


def test_top_p_that_is_met_exactly_keeps_no_token_more() -> None:
    """Weights 1, 1/2, 1/4 and 1/4 of a mass of 2: every sum is exact."""
    just_over = 0.5 + 2**-20
    assert edges([0.0, -1.0, -2.0, -2.0], [0.5, just_over, 0.75, 0.25, 0.875]) == [0.0, -1.0, -1.0, 0.0, -2.0]


def cutoff_of(logits: Tensor, params: Params, tile: int) -> float:
    """The cutoff by the kernel of one row of log2 weights."""
    num_tiles, cutoff = -(-logits.shape[1] // tile), torch.zeros(1, 1, device=DEVICE)
    stats = torch.zeros(2, 1, 1, num_tiles, device=DEVICE)
    rows = Rows(logits, logits.stride(0), *stats, cutoff, logits.shape[1], num_tiles)
    cu_rows, temperatures = torch.tensor([0, 1], device=DEVICE), torch.tensor([LOG2_E], device=DEVICE)
    row_stats(rows, cu_rows, temperatures, tile)
    filter_rows(rows, cu_rows, temperatures, filters_of((params,)), tile)
    return float(cutoff)


@quiet
@pytest.mark.parametrize(("top_p", "expected"), [(0.5, 0.0), (0.75, -1.0), (0.875, -2.0)])
def test_kernel_keeps_no_token_more_where_top_p_is_met_exactly(top_p: float, expected: float) -> None:
    logits = torch.tensor([[-1.0, -2.0, 0.0, -2.0]], device=DEVICE)
    assert cutoff_of(logits, Params(top_p=top_p), 16) == expected == edges(logits[0].tolist(), [top_p])[0]


@quiet
def test_kernel_cuts_within_a_fat_tail() -> None:
    """Tokens of 2^-21 of the likeliest one each hold 6 % of the mass together, in a vocabulary of 131k."""
    tail = -21 + torch.rand(1 << 17, generator=torch.Generator().manual_seed(1)) / 8
    logits = torch.cat((torch.zeros(1), tail))[None].to(DEVICE)
    got = cutoff_of(logits, Params(top_p=0.97), 1 << 15)
    assert -21 < got < -20.87
    assert got == edges(logits[0].tolist(), [0.97])[0]
