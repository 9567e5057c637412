"""Figures that cannot fall as something grows, from measurements that do."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression


def pooled(values: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """Find the closest values that never fall, by least squares: neighbours that fall share their weighted mean.

    weights: how much each value counts, above 0. The algorithm pools adjacent violators (Barlow et al., Statistical
    Inference under Order Restrictions, 1972).
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, of_before, num_before = blocks.pop()
            mean = (before * of_before + mean * total) / (of_before + total)
            total, count = of_before + total, num_before + count
        blocks.append((mean, total, count))
    return tuple(mean for mean, _, count in blocks for _ in range(count))


def end_slope(places: Sequence[float], values: Sequence[float]) -> float:
    """The slope behind the last place: of a straight line through the upper half of the points, by least squares.

    places: ascending. values: never falling, so the slope is not negative. A single point gives 0.
    """
    half = max(2, (len(places) + 1) // 2)
    xs, ys = places[-half:], values[-half:]
    return max(linear_regression(xs, ys).slope, 0.0) if len(xs) > 1 else 0.0
