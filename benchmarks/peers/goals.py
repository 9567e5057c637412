"""What our engine is meant to reach beside its peers, and how far it came. Ratios of speeds within a round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .contender import Contender

Speeds = Mapping[Contender, Sequence[float]]  # tokens per second, round by round
SAME = "float32"
FASTEST = None


@dataclass(frozen=True)
class Side:
    """An engine with a method, in one precision or in the one that turns out fastest."""

    engine: str
    method: str
    precision: str | None = SAME

    def fastest(self, speeds: Speeds) -> Contender | None:
        """The contender that stands for this side; None if none of them ran."""
        ran = [each for each in speeds if each[:2] == (self.engine, self.method)]
        allowed = [each for each in ran if self.precision in (FASTEST, each.precision)]
        return max(allowed, key=lambda each: statistics.median(speeds[each]), default=None)


@dataclass(frozen=True)
class Goal:
    """Ours is to be at least `ratio` times as fast as the other side."""

    batch: int
    ours: Side
    other: Side
    ratio: float


def _plain(engine: str, precision: str | None = SAME) -> Side:
    return Side(engine, "plain", precision)


GOALS = (
    Goal(1, _plain("ours"), _plain("transformers"), 1.0),
    Goal(1, _plain("ours", FASTEST), _plain("transformers"), 2.2),
    *(Goal(batch, _plain("ours"), _plain("transformers"), 1.3) for batch in (8, 32)),
    *(Goal(batch, _plain("ours", FASTEST), _plain("vllm", FASTEST), 1.8) for batch in (8, 32)),
    Goal(1, Side("ours", "ngram"), Side("transformers", "ngram"), 2.0),
    Goal(1, Side("ours", "draft_model"), Side("transformers", "draft_model"), 2.5),
    *(
        Goal(batch, Side("ours", method, FASTEST), Side("vllm", method, FASTEST), ratio)
        for batch, ratio in ((1, 2.5), (8, 1.5))
        for method in ("ngram", "draft_model", "eagle3", "dflash")
    ),
    *(
        Goal(1, Side("ours", method), _plain("ours"), 1.0)
        for method in ("ngram", "draft_model", "eagle", "eagle3", "dflash", "medusa", "mtp")
    ),
)


def verified(speeds: Speeds, batch: int) -> list[dict[str, Any]]:
    """The goals of a batch size whose two sides ran: the ratio's median and range over the rounds, met or not."""
    found = []
    for goal in GOALS:
        ours, other = goal.ours.fastest(speeds), goal.other.fastest(speeds)
        if goal.batch != batch or ours is None or other is None:
            continue
        ratios = [a / b for a, b in zip(speeds[ours], speeds[other], strict=True)]
        median = statistics.median(ratios)
        found.append(
            {
                "batch": batch,
                "ours": str(ours),
                "other": str(other),
                "goal": goal.ratio,
                "median": median,
                "range": [min(ratios), max(ratios)],
                "met": median >= goal.ratio,
            }
        )
    return found
