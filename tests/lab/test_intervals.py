"""Intervals, held against formulas written out and against drawing the units anew."""

import numpy as np
import pytest

from specdec.lab.intervals import Ratio, Spread, student_t, wilson


def test_quantiles_of_students_t_are_those_of_tables():
    tabled = {1: 12.706, 10: 2.228, 11: 2.201, 20: 2.086, 30: 2.042, 120: 1.980}
    assert [student_t(n) for n in tabled] == pytest.approx(list(tabled.values()), abs=1e-3)
    wider = {(1, 0.99): 63.657, (5, 0.99): 4.032, (10, 0.6): 0.879, (30, 0.999): 3.646, (1e6, 0.95): 1.960}
    assert [student_t(*each) for each in wider] == pytest.approx(list(wider.values()), abs=1e-3)


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


def test_an_interval_of_a_share_does_not_exceed_1():
    accepted, drafted = [10, 10, 10, 2], [10, 10, 10, 4]
    low, high = Ratio(accepted, drafted).interval
    assert high > 1
    assert Ratio(accepted, drafted, most=1).interval == (low, 1)


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


def simulated(random, num_repeats, num_units, *, units, repeats, cells, difference=0.0):
    """Times of two proposers on the same prompts, whose ratio to the same plain times differs by `difference`."""
    shape, wholes = (num_repeats, num_units), random.uniform(1, 3, num_units)

    def times(factor):
        noise = random.normal(0, units, num_units) + random.normal(0, repeats, (num_repeats, 1))
        return wholes * (factor + noise + random.normal(0, cells, shape))

    return Ratio(times(1.0), wholes), Ratio(times(1.0 + difference), wholes)


NOISE = [
    {"units": 0.05, "repeats": 0.0, "cells": 0.0},
    {"units": 0.0, "repeats": 0.05, "cells": 0.0},
    {"units": 0.0, "repeats": 0.0, "cells": 0.1},
    {"units": 0.05, "repeats": 0.03, "cells": 0.1},
]


@pytest.mark.parametrize("noise", NOISE, ids=lambda each: "-".join(key for key, value in each.items() if value))
@pytest.mark.parametrize("num_repeats", [3, 8])
def test_19_of_20_intervals_hold_the_truth_wherever_the_noise_is_from(noise, num_repeats):
    """1,000 comparisons of what is alike, from a fixed seed. The error of the share itself is 0.7 %."""
    random, inside = np.random.default_rng(1), 0
    for _ in range(1000):
        one, other = simulated(random, num_repeats, 12, **noise)
        low, high = one.difference(other)[1]
        inside += low <= 0 <= high
    assert 0.935 <= inside / 1000 <= 0.99


def test_one_figure_for_each_repeat_would_not_do():
    """Noise that all prompts of a repeat have in common is unseen by an interval over prompts."""
    random, inside = np.random.default_rng(1), 0
    for _ in range(500):
        one, other = simulated(random, 3, 12, units=0.0, repeats=0.05, cells=0.01)
        low, high = Ratio(one.parts.mean(0), one.wholes).difference(Ratio(other.parts.mean(0), other.wholes))[1]
        inside += low <= 0 <= high
    assert inside / 500 < 0.3


def test_a_difference_is_told_with_the_numbers_that_are_proposed():
    """Proposed from one comparison, tried on 200 others: 8 of 10 are asked for, and the comparison itself may err."""
    random = np.random.default_rng(2)
    noise = {"units": 0.05, "repeats": 0.01, "cells": 0.1}
    pilot, other = simulated(random, 6, 40, **noise)
    num_units, num_repeats = pilot.spread_beside(other).needed_for(0.05)
    told = 0
    for _ in range(200):
        base, slower = simulated(random, num_repeats, num_units, **noise, difference=0.05)
        low, _ = slower.difference(base)[1]
        told += low > 0
    assert told / 200 >= 0.65


def test_what_no_number_tells_apart_is_none_and_fewer_are_needed_for_more():
    spread = Spread(0.01, 0.0, 0.0, 10, 1)
    assert spread.needed_for(1e-6) is None
    (few, _), (many, repeats) = spread.needed_for(0.1), spread.needed_for(0.05)
    assert few < many
    assert repeats == 1
