"""What so many rows cost: measured while steps run, as a curve."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 16  # measurements of a point that count
REFRESH = 4  # records between two curves
LIFETIME = 1024  # records after which a point that was not measured again is forgotten
OUTLIER = 1.5  # times a point's value: a measurement above counts as that much
SLOWER = 0.25  # weight of a measurement above a point's value: a machine that does something else adds time only


@dataclass
class _Point:
    rows: float
    seconds: float
    count: int
    seen: int


class CostCurve:
    """Seconds by rows. Each half power of two has one point, an average of its last measurements below the mean.

    The curve is the points' lower hull: straight between points, never falling, its slope never smaller further on.
    So a sum of gains that shrink is best cut where the next gain is no longer worth the slope.
    """

    def __init__(self, *, convex: bool = True) -> None:
        """convex: False for what has a fixed cost from the first row on. The curve goes through all points then."""
        self._convex = convex
        self._points: dict[int, _Point] = {}
        self._hull: list[tuple[float, float]] = []
        self._num_records = 0

    @property
    def is_known(self) -> bool:
        """Whether two numbers of rows were measured at least: one has no slope."""
        return len(self._hull) > 1

    def record(self, rows: int, seconds: float) -> None:
        """Count a measurement."""
        self._num_records += 1
        key = int(2 * math.log2(rows)) if rows > 0 else -1
        point = self._points.setdefault(key, _Point(rows, seconds, 0, 0))
        point.count, point.seen = min(point.count + 1, MEMORY), self._num_records
        point.rows += (rows - point.rows) / point.count
        change = min(seconds, OUTLIER * point.seconds) - point.seconds
        point.seconds += (change if change < 0 else SLOWER * change) / point.count
        if point.count < MEMORY or self._num_records % REFRESH == 0:
            self._hull = self._lower_hull()

    def seconds(self, rows: float) -> float:
        """At least 0. Beyond the points the curve goes straight on."""
        (x, y), slope = self._at(rows)
        return max(y + slope * (rows - x), 0.0)

    def slope(self, rows: float) -> float:
        """Seconds of one row more."""
        return self._at(rows)[1]

    def _at(self, rows: float) -> tuple[tuple[float, float], float]:
        """The point that the piece around `rows` begins at, and its slope."""
        hull = self._hull
        place = next((i for i, (x, _) in enumerate(hull[1:-1], start=1) if rows < x), len(hull) - 1)
        (x, y), (next_x, next_y) = hull[place - 1], hull[place]
        return (x, y), max((next_y - y) / (next_x - x), 0.0)

    def _lower_hull(self) -> list[tuple[float, float]]:
        oldest = self._num_records - LIFETIME
        points = sorted((each.rows, each.seconds) for each in self._points.values() if each.seen > oldest)
        hull: list[tuple[float, float]] = []
        for point in points:
            while self._convex and len(hull) > 1 and not _turns_up(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        return hull


def _turns_up(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether the middle lies below the line between the others."""
    (x0, y0), (x1, y1), (x2, y2) = first, middle, last
    return (y1 - y0) * (x2 - x0) < (y2 - y0) * (x1 - x0)
