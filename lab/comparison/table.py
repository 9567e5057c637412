"""The figures of what was compared, in the order asked for, with intervals of their differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.core.request.metrics import RequestMetrics

from ..intervals import CONFIDENCE, Figures, Ratio
from ..measure import summed
from ..result import acceptance_facts, break_even_facts


@dataclass(frozen=True)
class Measured:
    """One variant over all units: prompts that ran together, the same ones for every variant."""

    label: str
    facts: Mapping[str, Any]  # what else its row says
    counts: Sequence[RequestMetrics]  # by unit
    seconds: Sequence[Sequence[float]] | None  # by repeat and unit; None: no time is known


@dataclass(frozen=True)
class Metric:
    """A figure to sort by: a ratio of sums over units."""

    parts: Callable[[Measured], Figures]
    wholes: Callable[[Measured], Figures]

    def of(self, measured: Measured) -> Ratio:
        """The metric's value for one variant."""
        return Ratio(self.parts(measured), self.wholes(measured))


def _counted(name: str) -> Callable[[Measured], Sequence[float]]:
    return lambda measured: [getattr(counts, name) for counts in measured.counts]


def _seconds(measured: Measured) -> Sequence[Sequence[float]]:
    assert measured.seconds is not None, "metrics of time are offered where there are times"
    return measured.seconds


METRICS = {
    "speedup": "plain decoding's time / time",
    "tokens_per_second": "output tokens / time",
    "tokens_per_target_step": "output tokens / target steps, drafted or not",
    "mean_acceptance_length": "1 + accepted tokens / drafted steps",
    "draft_acceptance_rate": "accepted tokens / draft tokens",
}
"""What a table can be sorted by; more is better in all of them."""

TIMED = ("speedup", "tokens_per_second")
"""Those of them that are known only where times are."""


TELL_APART = 0.05
"""The difference to the best, as a share of its value, for which needed numbers of prompts and repeats are given."""


def comparison_facts(
    measured: Sequence[Measured],
    categories: Sequence[str],
    plain_seconds: Figures | None,
    sort: str,
    tell_apart: float = TELL_APART,
) -> list[dict[str, Any]]:
    """A row for each variant, the best one first.

    categories: of each unit. plain_seconds: plain decoding's times by unit, or by repeat and unit. None means unknown.
    sort: one of METRICS for which everything is known. Intervals of the differences to the best hold for all rows
    together: which row is the best was decided by the same figures (Hsu, Multiple Comparisons, chapter 4, with
    Bonferroni's bound for its quantile).
    """
    confidence = 1 - (1 - CONFIDENCE) / max(len(measured) - 1, 1)
    metrics = _metrics(measured, plain_seconds)
    ranked = sorted(measured, key=lambda each: -metrics[sort].of(each).value)
    rows = [_row(each, metrics) | {"by_category": _by_category(each, metrics, categories)} for each in ranked]
    if plain_seconds is not None:
        for row in rows:
            row |= break_even_facts(row["seconds"], _total(plain_seconds), row) if row["seconds"] else {}
    best = metrics[sort].of(ranked[0])
    for row, each in zip(rows, ranked, strict=True):
        difference, interval = metrics[sort].of(each).difference(best, confidence)
        row["to_tell_apart"] = (
            None if row is rows[0] else _to_tell_apart(metrics[sort].of(each), best, tell_apart, confidence)
        )
        row["difference_to_best"] = difference
        row["difference_to_best_interval"] = interval
        row["is_on_pareto_front"] = not any(_dominates(other, row) for other in rows)
    return rows


def _to_tell_apart(one: Ratio, best: Ratio, share: float, confidence: float) -> dict[str, Any] | None:
    """The prompts and repeats that tell a difference of this share of the best. None means unknown."""
    spread = one.spread_beside(best)
    needed = spread and spread.needed_for(share * best.value, confidence)
    return {"share": share, "num_prompts": needed[0], "repeat": needed[1]} if needed else None


def _total(seconds: Figures) -> float:
    """Sum the seconds of all units, averaged over the repeats."""
    return float(np.atleast_2d(np.asarray(seconds)).mean(axis=0).sum())


def _metrics(measured: Sequence[Measured], plain_seconds: Figures | None) -> dict[str, Metric]:
    """The metrics for which every figure is known."""
    steps, tokens = _counted("num_steps"), _counted("num_committed_tokens")
    drafts, drafted, accepted = map(_counted, ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    metrics = {
        "tokens_per_target_step": Metric(tokens, steps),
        "mean_acceptance_length": Metric(
            lambda each: [a + d for a, d in zip(accepted(each), drafts(each), strict=True)], drafts
        ),
        "draft_acceptance_rate": Metric(accepted, drafted),
    }
    if all(each.seconds is not None for each in measured):
        metrics["tokens_per_second"] = Metric(tokens, _seconds)
        if plain_seconds is not None:
            metrics["speedup"] = Metric(lambda _: plain_seconds, _seconds)
    return metrics


def _row(each: Measured, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    row: dict[str, Any] = {"label": each.label, **each.facts, **dict.fromkeys(("speedup", "speedup_interval"))}
    row |= {"seconds": _total(each.seconds) if each.seconds is not None else None, "tokens_per_second": None}
    counts = summed(each.counts)
    row |= acceptance_facts(counts)
    row["draft_tokens_per_step"] = counts.num_draft_tokens / counts.num_steps
    for name, metric in metrics.items():
        ratio = metric.of(each)
        if name != "mean_acceptance_length" or counts.num_drafts:  # 1 where nothing was drafted
            row[name] = ratio.value
        row[f"{name}_interval"] = ratio.interval
    return row


def _by_category(each: Measured, metrics: Mapping[str, Metric], categories: Sequence[str]) -> dict[str, Any]:
    found = {}
    for category in dict.fromkeys(categories):
        chosen = [unit for unit, name in enumerate(categories) if name == category]
        counts = summed(each.counts[unit] for unit in chosen)
        found[category] = acceptance_facts(counts)
        for name in ("speedup", "tokens_per_second"):
            if name in metrics:
                part = metrics[name].of(each).of_units(chosen)
                found[category] |= {name: part.value, f"{name}_interval": part.interval}
    return found


def _dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `one` has no fewer tokens per step from no more drafts, and is better in one of the two."""
    drafts = other["draft_tokens_per_step"] - one["draft_tokens_per_step"]
    tokens = one["tokens_per_target_step"] - other["tokens_per_target_step"]
    return bool(drafts >= 0 and tokens >= 0 and (drafts > 0 or tokens > 0))
