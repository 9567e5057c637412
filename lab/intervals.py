"""Confidence intervals of what a run measures, and how much it takes to make them narrower."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, pi, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

FEWEST_UNITS = 3
CONFIDENCE = 0.95
POWER = 0.8  # how often a difference that there is shall be told
FEWEST_PROPOSED = 6  # units, and half as many repeats: what a variance was guessed from was no more itself
MOST_TIMES = 4096  # as many units are proposed at most
Z95 = NormalDist().inv_cdf(0.975)
Interval = tuple[float, float]
Figures = Sequence[float] | Sequence[Sequence[float]] | np.ndarray


@lru_cache(maxsize=1024)
def student_t(degrees_of_freedom: float, confidence: float = CONFIDENCE) -> float:
    """Two-sided quantile of Student's t: |t| stays below it with this probability.

    With t = sqrt(n) * tan(angle), the density of the angle is cos(angle) ** (n - 1), which is summed up here.
    """
    n = max(degrees_of_freedom, 1.0)
    angles = np.linspace(0, min(pi / 2, 12 / sqrt(n)), 20_001)
    density = np.cos(angles) ** (n - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return sqrt(n) * float(np.tan(np.interp(confidence * below[-1], below, angles)))


def wilson(successes: int, trials: int) -> Interval:
    """95 % confidence interval of a share (Wilson's score interval). (0, 1) without a trial."""
    if trials == 0:
        return 0.0, 1.0
    share, z2 = successes / trials, Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True)
class Spread:
    """How far a mean over units and repeats may be off: variances by where they come from.

    Units and repeats are drawn independently and crossed: every unit is measured in every repeat. The variance of their
    mean is the sum of three parts, estimated as in a two-way analysis of variance (Searle, Casella, McCulloch, Variance
    Components, chapter 4).
    """

    of_units: float
    of_repeats: float  # 0 with one repeat, of which it cannot be known
    of_cells: float  # what is left
    num_units: int
    num_repeats: int

    @classmethod
    def of(cls, residuals: np.ndarray) -> Spread | None:
        """Measure the spread of [R, U] deviations, whose mean is 0. None means too few units to tell."""
        num_repeats, num_units = residuals.shape
        if num_units < FEWEST_UNITS:
            return None
        units = residuals.mean(axis=0)
        if num_repeats == 1:
            return cls(float(units.var(ddof=1)), 0.0, 0.0, num_units, 1)
        repeats = residuals.mean(axis=1)
        rest = residuals - units - repeats[:, None] + residuals.mean()
        cells = float((rest**2).sum()) / ((num_units - 1) * (num_repeats - 1))
        of_units = max(float(units.var(ddof=1)) - cells / num_repeats, 0.0)
        of_repeats = max(float(repeats.var(ddof=1)) - cells / num_units, 0.0)
        return cls(of_units, of_repeats, cells, num_units, num_repeats)

    def half_width(self, confidence: float = CONFIDENCE) -> float:
        """Half the width of the mean's confidence interval."""
        error, degrees_of_freedom = self._error(self.num_units, self.num_repeats)
        return student_t(round(degrees_of_freedom, 2), confidence) * error

    def _error(self, num_units: int, num_repeats: int) -> tuple[float, float]:
        """The standard error of a mean over so many, and Satterthwaite's degrees of freedom."""
        cells = self.of_cells / (num_units * num_repeats)
        units, repeats = self.of_units / num_units, self.of_repeats / num_repeats
        of_cells = (num_units - 1) * max(num_repeats - 1, 1)
        squares = []  # mean squares and their degrees of freedom; a part that shows no variance has none of its own
        if units:
            squares.append((units + cells, num_units - 1))
        if repeats:
            squares.append((repeats + cells, max(num_repeats - 1, 1)))
        if len(squares) != 1:
            squares.append((cells, of_cells))
        variance, spread = units + repeats + cells, sum(each**2 / degrees for each, degrees in squares)
        return sqrt(variance), variance**2 / spread if spread else of_cells

    def needed_for(self, difference: float, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
        """The units and repeats, fewest in all, with which a difference of this size is told in 8 of 10 comparisons.

        With one repeat, only units are varied. None means that no reasonable number is enough.
        """
        repeats = [FEWEST_PROPOSED // 2 * 2**power for power in range(9)] if self.num_repeats > 1 else [1]
        found = [
            (units, each) for each in repeats if (units := self._units_for(difference, confidence, each)) is not None
        ]
        return min(found, key=lambda each: (each[0] * each[1], each[1]), default=None)

    def _units_for(self, difference: float, confidence: float, num_repeats: int) -> int | None:
        def enough(num_units: int) -> bool:
            error, degrees_of_freedom = self._error(num_units, num_repeats)
            told = student_t(round(degrees_of_freedom, 1), confidence)
            return (told + student_t(round(degrees_of_freedom, 1), 2 * POWER - 1)) * error <= abs(difference)

        numbers = range(FEWEST_PROPOSED, MOST_TIMES + 1)
        place = bisect_left(numbers, True, key=enough)
        return numbers[place] if place < len(numbers) else None


@dataclass(frozen=True)
class Ratio:
    """A ratio of two sums over units that were drawn together, such as prompts: tokens per step, time per time."""

    parts: Figures  # [U], or [R, U] where they were measured R times
    wholes: Figures  # [U] or [R, U]
    most: float = inf  # what the ratio cannot exceed: 1 for a share

    @property
    def value(self) -> float:
        """The sum of the parts / the sum of the wholes, of one repeat on average; 0 where nothing is whole."""
        whole = float(_table(self.wholes).mean())
        return float(_table(self.parts).mean()) / whole if whole else 0.0

    @property
    def interval(self) -> Interval | None:
        """95 % confidence interval of the value over other units and repeats of the kind, on a logarithmic scale.

        It ends at `most`. None means that the value is 0, or that there are fewer than three units: two say nothing of
        their spread.
        """
        spread = Spread.of(self._residuals)
        if spread is None or self.value <= 0:
            return None
        half = spread.half_width() / self.value
        return self.value * exp(-half), min(self.value * exp(half), self.most)

    def difference(self, other: Ratio, confidence: float = CONFIDENCE) -> tuple[float, Interval | None]:
        """Subtract the value of `other` on the same units. The interval leaves out what the units share."""
        difference, spread = self.value - other.value, self.spread_beside(other)
        half = None if spread is None else spread.half_width(confidence)
        return difference, None if half is None else (difference - half, difference + half)

    def spread_beside(self, other: Ratio) -> Spread | None:
        """The spread of the difference between the two."""
        return Spread.of(self._residuals - other._residuals)

    @property
    def _residuals(self) -> np.ndarray:
        """[R, U], what each adds to the value's error, by linearisation (Cochran, Sampling Techniques, chapter 6)."""
        parts, wholes = _table(self.parts), _table(self.wholes)
        mean = wholes.mean()
        return (parts - self.value * wholes) / mean if mean else np.zeros_like(wholes)


def _table(figures: Any) -> np.ndarray:
    return np.atleast_2d(np.asarray(figures, dtype=float))
