"""The figures of what was compared, in the order asked for, with intervals of their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from specdec.core.request.metrics import RequestMetrics
from specdec.sdk.errors import not_offered

from ..intervals import CONFIDENCE, Figures, Ratio
from ..measure import summed
from ..result import acceptance_facts, break_even_facts


@dataclass(frozen=True)
class Measured:
    """One variant over all units: prompts that ran together, the same ones for every variant."""

    label: str
    facts: Mapping[str, Any]  # what else its row says
    counts: Sequence[RequestMetrics]  # by unit
    seconds: Figures | None  # by repeat and unit; None: no time is known


TIMED = ("speedup", "tokens_per_second")
"""What a table can be sorted by only where times are known."""

FIGURES = (*TIMED, "tokens_per_target_step", "mean_acceptance_length", "draft_acceptance_rate")
"""What a table can be sorted by."""

TELL_APART = 0.05
"""The difference to the best, as a share of its value, for which needed numbers of prompts and repeats are given."""


def require_figure(sort: str) -> None:
    """Raise ConfigError SD-E132 for what a table cannot be sorted by."""
    if sort not in FIGURES:
        raise not_offered("a comparison cannot be sorted by that", sort, FIGURES)


def comparison_facts(
    measured: Sequence[Measured],
    categories: Sequence[str],
    plain_seconds: Figures | None,
    sort: str,
    tell_apart: float = TELL_APART,
    prompts_per_unit: float = 1,
    plain_tokens: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """A row for each variant, the best one first.

    categories: of each unit. plain_seconds: plain decoding's times by unit, or by repeat and unit. None means unknown.
    sort: one of FIGURES, of which more is better. prompts_per_unit: on average. plain_tokens: plain decoding's output
    tokens by unit. None means as many as every variant has.

    Intervals of the differences to the best hold for all rows together. Which row is the best was decided by the same
    figures. So Bonferroni's bound is taken over every pair of rows.
    """
    confidence = 1 - (1 - CONFIDENCE) / max(len(measured) * (len(measured) - 1) // 2, 1)
    ranked = [(each, _ratios(each, plain_seconds, plain_tokens)) for each in measured]
    ranked.sort(key=lambda pair: -pair[1][sort].value)
    rows = [
        _row(*pair) | {"by_category": _by_category(pair[0], categories, plain_seconds, plain_tokens)} for pair in ranked
    ]
    for row, (_, ratios) in zip(rows, ranked, strict=True):
        if "speedup" in ratios and row["seconds"]:
            row |= break_even_facts(row["seconds"], _total(ratios["speedup"].parts), row)
    best = ranked[0][1][sort]
    for row, (_, ratios) in zip(rows, ranked, strict=True):
        difference, interval = ratios[sort].difference(best, confidence)
        row["to_tell_apart"] = None
        if row is not rows[0]:
            row["to_tell_apart"] = _to_tell_apart(ratios[sort], best, tell_apart, confidence, prompts_per_unit)
        row["difference_to_best"] = difference
        row["difference_to_best_interval"] = interval
        row["is_on_pareto_front"] = not any(_dominates(other, row) for other in rows)
    return rows


def _to_tell_apart(
    one: Ratio, best: Ratio, share: float, confidence: float, prompts_per_unit: float
) -> dict[str, Any] | None:
    """The prompts and repeats that tell a difference of this share of the best. None means unknown."""
    spread = one.spread_beside(best)
    needed = spread and spread.needed_for(share * best.value, confidence)
    if not needed:
        return None
    return {"share": share, "num_prompts": ceil(needed[0] * prompts_per_unit), "repeat": needed[1]}


def _total(seconds: Figures) -> float:
    """Sum the seconds of all units, averaged over the repeats."""
    return float(np.atleast_2d(np.asarray(seconds)).mean(axis=0).sum())


def _ratios(
    each: Measured, plain_seconds: Figures | None, plain_tokens: Sequence[int] | None = None
) -> dict[str, Ratio]:
    """The figures that are known, by name: each is a ratio of sums over units."""
    steps = [counts.num_steps for counts in each.counts]
    tokens = [counts.num_committed_tokens for counts in each.counts]
    drafts = [counts.num_drafts for counts in each.counts]
    drafted = [counts.num_draft_tokens for counts in each.counts]
    accepted = [counts.num_accepted_tokens for counts in each.counts]
    counted = drafts if any(drafts) else [1] * len(drafts)  # an acceptance length is 1 where nothing was drafted
    ratios = {
        "tokens_per_target_step": Ratio(tokens, steps),
        "mean_acceptance_length": Ratio([sum(pair) for pair in zip(accepted, counted, strict=True)], counted),
        "draft_acceptance_rate": Ratio(accepted, drafted, most=1.0),
    }
    if each.seconds is not None:
        ratios["tokens_per_second"] = Ratio(tokens, each.seconds)
        if plain_seconds is not None:
            ratios["speedup"] = Ratio(_for_as_many(tokens, plain_seconds, plain_tokens or tokens), each.seconds)
    return ratios


def _for_as_many(tokens: Sequence[int], plain_seconds: Figures, plain_tokens: Sequence[int]) -> Figures:
    """Plain decoding's seconds by unit, as they would be for as many tokens in all.

    The last term sums up to 0. It brings what the tokens vary between units into the interval, by linearisation.
    """
    now, plain, seconds = (np.asarray(each, dtype=float) for each in (tokens, plain_tokens, plain_seconds))
    varied = now / now.mean() - plain / plain.mean()
    return np.asarray(now.sum() / plain.sum() * (seconds + seconds.mean() * varied))


def _row(each: Measured, ratios: Mapping[str, Ratio]) -> dict[str, Any]:
    row: dict[str, Any] = {"label": each.label, **each.facts, **dict.fromkeys(("speedup", "speedup_interval"))}
    row |= {"seconds": _total(each.seconds) if each.seconds is not None else None, "tokens_per_second": None}
    counts = summed(each.counts)
    row |= acceptance_facts(counts)
    row["draft_tokens_per_step"] = counts.num_draft_tokens / counts.num_steps
    for name, ratio in ratios.items():
        row[name] = ratio.value
        row[f"{name}_interval"] = ratio.interval
    return row


def _by_category(
    each: Measured, categories: Sequence[str], plain_seconds: Figures | None, plain_tokens: Sequence[int] | None
) -> dict[str, Any]:
    found = {}
    for category in dict.fromkeys(categories):
        chosen = [unit for unit, name in enumerate(categories) if name == category]
        times = (None if table is None else np.asarray(table)[..., chosen] for table in (each.seconds, plain_seconds))
        seconds, plain = times
        part = replace(each, counts=[each.counts[unit] for unit in chosen], seconds=seconds)
        found[category] = acceptance_facts(summed(part.counts))
        ratios = _ratios(part, plain, plain_tokens and [plain_tokens[unit] for unit in chosen])
        for name in TIMED:
            if name in ratios:
                found[category] |= {name: ratios[name].value, f"{name}_interval": ratios[name].interval}
    return found


def _dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `one` has no fewer tokens per step from no more drafts, and is better in one of the two."""
    drafts = other["draft_tokens_per_step"] - one["draft_tokens_per_step"]
    tokens = one["tokens_per_target_step"] - other["tokens_per_target_step"]
    return bool(drafts >= 0 and tokens >= 0 and (drafts > 0 or tokens > 0))
