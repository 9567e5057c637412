"""Intervals, held against formulas written out and against drawing the units anew."""

import numpy as np
import pytest

from specdec.lab.intervals import T95, Ratio, t95, wilson


def test_quantiles_of_students_t_are_those_of_tables():
    tabled = {1: 12.706, 10: 2.228, 11: 2.201, 20: 2.086, 30: 2.042, 120: 1.980}
    assert [t95(n) for n in tabled] == pytest.approx(list(tabled.values()), abs=1e-3)
    assert list(T95) == sorted(T95, reverse=True)


def test_an_interval_of_a_share_is_wilsons():
    assert wilson(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-4)
    assert wilson(0, 0) == (0, 1)
    low, high = wilson(0, 20)
    assert low == pytest.approx(0)
    assert 0 < high < 0.2


def test_a_ratio_is_of_sums_and_needs_three_units_for_an_interval():
    ratio = Ratio([2, 6, 4], [1, 2, 3])
    assert ratio.value == 2
    low, high = ratio.interval
    assert low < 2 < high
    assert Ratio([2, 6], [1, 2]).interval is None


def test_intervals_are_those_of_drawing_the_units_anew():
    """The plain form: ratios of 4,000 samples of the same units, with replacement."""
    random = np.random.default_rng(0)
    wholes = random.integers(20, 60, 200).astype(float)
    parts, others = (wholes * random.normal(mean, 0.4, 200) for mean in (2.0, 1.9))
    samples = random.integers(0, 200, (4000, 200))
    drawn = parts[samples].sum(1) / wholes[samples].sum(1)
    assert Ratio(parts, wholes).interval == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.01)
    difference, interval = Ratio(parts, wholes).difference(Ratio(others, wholes))
    drawn -= others[samples].sum(1) / wholes[samples].sum(1)
    assert difference == pytest.approx(parts.sum() / wholes.sum() - others.sum() / wholes.sum())
    assert interval == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.015)


def test_what_units_share_drops_out_of_a_difference():
    wholes = [1.0, 2.0, 3.0, 4.0]
    one, other = Ratio([2.1, 9.9, 6.2, 30.0], wholes), Ratio([1.1, 7.9, 3.2, 26.0], wholes)
    difference, (low, high) = one.difference(other)
    assert difference == pytest.approx(1)
    assert high - low < 1e-9
    assert one.interval[1] - one.interval[0] > 1
