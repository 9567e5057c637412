"""One function makes every row's distribution: filters, ties, repair of bad rows, picks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.filters import FilterRows
from specdec.core.kernels.pick import cumulate, empty_tiles, pick
from specdec.core.kernels.row_distribution import RowDistribution, row_distribution, scale_of
from specdec.core.rejection.torch_backend import first_argmax
from specdec.testing.rejection.reference import Params, target_distribution

from .problems import SAMPLING, filtered_distribution

SIZES = [1, 2, 5, 127, 128, 129, 256, 300, 4097, 4224]


def distribution_of(logits: Tensor, params: Params) -> RowDistribution:
    rows = len(logits)
    filters = FilterRows(
        top_k=torch.full((rows,), params.top_k),
        top_p=torch.full((rows,), params.top_p),
        min_p=torch.full((rows,), params.min_p),
    )
    return row_distribution(logits, scale_of(torch.full((rows,), params.temperature)), filters)


def probs_of(distribution: RowDistribution) -> Tensor:
    return distribution.probs(torch.arange(len(distribution.weights))).view(len(distribution.weights), -1)[
        :, : distribution.vocab_size
    ]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("quantised", [False, True], ids=["distinct", "ties"])
def test_filters_match_their_definition_as_sets(sampling: str, quantised: bool) -> None:
    logits = 2 * torch.randn(20, 23, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = logits.round() if quantised else logits
    params = SAMPLING[sampling]
    got, want = (
        probs_of(distribution_of(logits, params)),
        torch.stack([filtered_distribution(row, params) for row in logits]),
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
    specification = torch.stack([target_distribution(row, params) for row in logits])
    assert torch.equal(specification > 0, want > 0)


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_top_p_is_exact_beyond_the_candidates_first_tried(vocab_size: int) -> None:
    g = torch.Generator().manual_seed(2)
    flat = 0.3 * torch.randn(3, vocab_size, generator=g, dtype=torch.float64)
    peaked = torch.cat((flat[:1], 9 * flat[1:2], 30 * flat[2:]))
    for params in (Params(top_p=0.9), Params(top_p=0.9, top_k=200), Params(top_p=0.999)):
        got = probs_of(distribution_of(peaked, params)) > 0
        assert torch.equal(got, torch.stack([target_distribution(row, params) for row in peaked]) > 0)


def test_ties_at_the_threshold_are_all_kept() -> None:
    row = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (Params(top_k=2), Params(top_p=0.80), Params(min_p=math.exp(-2) * 0.999)):
        assert (probs_of(distribution_of(row, params)) > 0).tolist() == [[True, True, True, True, False]]


def test_filters_that_remove_nothing_change_no_bit() -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(3))
    plain = row_distribution(logits, scale_of(torch.full((7,), 0.8)))
    for params in (Params(0.8, top_k=300), Params(0.8, top_k=999), Params(0.8, top_p=1.0, min_p=0.0)):
        distribution = distribution_of(logits, params)
        assert torch.equal(distribution.cdf, plain.cdf)
        assert torch.equal(distribution.weights, plain.weights)


def test_filters_always_leave_the_maximum() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(4))
    for params in (Params(top_k=1), Params(top_p=0.0), Params(min_p=1.0), Params(top_k=1, top_p=0.0, min_p=1.0)):
        assert torch.equal(probs_of(distribution_of(logits, params)).argmax(1), logits.argmax(1))
        assert (probs_of(distribution_of(logits, params)) > 0).sum(1).tolist() == [1] * 4


def test_filters_of_one_row_do_not_touch_another() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(5))
    filters = FilterRows(torch.tensor([0, 5, 0]), torch.tensor([1.0, 1.0, 0.5]), torch.tensor([0.0, 0.0, 0.0]))
    mixed = row_distribution(logits, scale_of(torch.ones(3)), filters)
    for row, params in enumerate([Params(), Params(top_k=5), Params(top_p=0.5)]):
        assert torch.equal(mixed.weights[row : row + 1], distribution_of(logits[row : row + 1], params).weights)


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e30, math.inf])
def test_extreme_temperatures_give_a_distribution(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -math.inf]])
    probs = probs_of(row_distribution(logits, scale_of(torch.tensor([temperature]))))
    assert float(probs.sum()) == pytest.approx(1.0)
    assert probs[0, 3] == 0
    expected = [0.0, 1.0, 0.0] if temperature < 1 else [1 / 3] * 3
    assert probs[0, :3].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_pick_is_the_inverse_cdf_in_index_order(vocab_size: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(50, vocab_size, generator=g).to(dtype)
    weights = weights.masked_fill(torch.rand(50, vocab_size, generator=g) < 0.3, 0.0)
    weights[:, vocab_size // 2] += 0.01
    tiles = empty_tiles(50, vocab_size, weights)
    tiles.view(50, -1)[:, :vocab_size] = weights
    cdf = cumulate(tiles)
    for uniforms in (torch.rand(50, generator=g).double(), torch.full((50,), 2.0**-53), torch.full((50,), 1.0)):
        ids = pick(tiles, cdf, uniforms.double())
        assert (weights.gather(1, ids.unsqueeze(1)) > 0).all()
        upper = weights.double().cumsum(1)
        target = uniforms.double() * upper[:, -1]
        slack = 1e-6 * upper[:, -1]
        at = ids.unsqueeze(1)
        assert (upper.gather(1, at).squeeze(1) >= target - slack).all()
        assert ((upper - weights).gather(1, at).squeeze(1) <= target + slack).all()


@pytest.mark.parametrize("vocab_size", SIZES)
def test_first_argmax_takes_the_lowest_of_equal_maxima(vocab_size: int) -> None:
    values = torch.randint(0, 3, (40, vocab_size), generator=torch.Generator().manual_seed(6)).float()
    maxima, ids = first_argmax(values)
    assert torch.equal(maxima, values.amax(1))
    assert ids.tolist() == [row.index(max(row)) for row in values.tolist()]


def test_shifted_logits_have_the_same_distribution() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for params in SAMPLING.values():
        shifted = replace(params, temperature=1.0)
        torch.testing.assert_close(
            probs_of(distribution_of(logits + 37.0, shifted)), probs_of(distribution_of(logits, shifted))
        )


@pytest.mark.parametrize("vocab_size", [4096, 32000])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_single_precision_distribution_of_a_real_vocabulary_is_within_tolerance(vocab_size: int, spread: float) -> None:
    """Both p(x), which verifies drafts, and the distribution that picks imply: tile masses, then weights inside the
    tile.
    """
    logits = 20 + spread * torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(8))
    scale = scale_of(torch.tensor([0.3, 0.7, 1.0, 2.0]))
    single, double = row_distribution(logits, scale), row_distribution(logits.double(), scale)
    exact = probs_of(double)
    verified = single.weights.double().flatten(1)[:, :vocab_size] / single.mass
    tile_mass = single.cdf.diff(dim=1, prepend=torch.zeros(4, 1, dtype=torch.float64)) / single.mass
    inside = single.weights.double()
    picked = tile_mass.unsqueeze(2) * inside / inside.sum(2, keepdim=True).clamp(min=1e-300)
    for distribution in (verified, picked.flatten(1)[:, :vocab_size]):
        assert float((distribution - exact).abs().sum(1).max()) / 2 <= 2e-7
