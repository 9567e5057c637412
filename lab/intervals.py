"""Confidence intervals of what a run measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import NormalDist

import numpy as np

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t for 1 .. 10 degrees of freedom."""

FEWEST_UNITS = 3
Z95 = NormalDist().inv_cdf(0.975)
Interval = tuple[float, float]


def t95(degrees_of_freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t.

    Above the table: Fisher and Cornish's expansion about the normal quantile, good to a thousandth there.
    """
    if degrees_of_freedom <= len(T95):
        return T95[degrees_of_freedom - 1]
    z, n = Z95, degrees_of_freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def wilson(successes: int, trials: int) -> Interval:
    """95 % confidence interval of a share (Wilson's score interval). (0, 1) without a trial."""
    if trials == 0:
        return 0.0, 1.0
    share, z2 = successes / trials, Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True)
class Ratio:
    """A ratio of two sums over units that were drawn together, such as prompts: tokens per step, time per time."""

    parts: Sequence[float]  # [U]
    wholes: Sequence[float]  # [U]

    @property
    def value(self) -> float:
        """The sum of the parts / the sum of the wholes; 0 where nothing is whole."""
        whole = float(np.sum(self.wholes))
        return float(np.sum(self.parts)) / whole if whole else 0.0

    @property
    def interval(self) -> Interval | None:
        """95 % confidence interval of the value over other units of the same kind, on a logarithmic scale.

        None means that the value is 0, or that there are fewer than three units: two say nothing of their spread.
        """
        half = _half_width(self._residuals)
        if half is None or self.value <= 0:
            return None
        return self.value * exp(-half / self.value), self.value * exp(half / self.value)

    def difference(self, other: Ratio) -> tuple[float, Interval | None]:
        """This value less that of `other` on the same units, with its interval: what the units share drops out."""
        difference = self.value - other.value
        half = _half_width(self._residuals - other._residuals)
        return difference, None if half is None else (difference - half, difference + half)

    @property
    def _residuals(self) -> np.ndarray:
        """What each unit adds to the value's error, by linearisation (Cochran, Sampling Techniques, chapter 6)."""
        wholes = np.asarray(self.wholes, dtype=float)
        mean = wholes.mean()
        return (np.asarray(self.parts) - self.value * wholes) / mean if mean else np.zeros_like(wholes)


def _half_width(residuals: np.ndarray) -> float | None:
    if len(residuals) < FEWEST_UNITS:
        return None
    return t95(len(residuals) - 1) * float(residuals.std(ddof=1)) / sqrt(len(residuals))
