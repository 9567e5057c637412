"""What a run says: one JSON object, in which every number is derived once and from counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from specdec.core.request.metrics import RequestMetrics

from .equality import Difference
from .intervals import student_t
from .measure import Pass, Step, merged_acceptance
from .prompts import BenchPrompt

SCHEMA_VERSION = 1


def places(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where each cell was measured: the model and the data set, with its file or the recording where they repeat."""
    runs = [cell["configuration"] for cell in cells]
    names = [f"{run['model']}, {run.get('dataset_name', 'recording')}" for run in runs]
    files = [str(run.get("recording") or run.get("dataset_path") or "") for run in runs]
    return [
        f"{name} {file}".strip() if names.count(name) > 1 else name for name, file in zip(names, files, strict=True)
    ]


def signed(by: str, *differences: float) -> list[str]:
    """Differences of a figure as texts. Those of a rate are in percentage points, as rates are shown in percent."""
    return [f"{100 * each:+.1f} pp" if by == "draft_acceptance_rate" else f"{each:+.3f}" for each in differences]


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat and output tokens of one, by category."""

    repeats: tuple[dict[str, float], ...]
    num_tokens: Mapping[str, int]

    @classmethod
    def of(cls, repeats: Sequence[Sequence[Pass]]) -> Timing:
        """The times of what one engine ran."""
        num_tokens = {each.category: each.acceptance.num_committed_tokens for each in repeats[0]}
        return cls(tuple({each.category: each.seconds for each in passes} for passes in repeats), num_tokens)

    def tokens(self, category: str | None = None) -> int:
        """Output tokens of one repeat, of one category or in total."""
        return sum(number for name, number in self.num_tokens.items() if category in (None, name))

    def each(self, category: str | None = None) -> list[float]:
        """Seconds of each repeat, of one category or in total."""
        return [sum(s for name, s in repeat.items() if category in (None, name)) for repeat in self.repeats]

    def mean(self, category: str | None = None) -> float:
        """Seconds of a repeat, on average."""
        return fmean(self.each(category))


@dataclass(frozen=True)
class Baseline:
    """Plain decoding's times for the same prompts."""

    timing: Timing
    paired: bool  # whether repeat i ran beside repeat i of what it is compared with

    def speedup(self, timing: Timing, category: str | None = None) -> float:
        """Plain time / time for as many tokens, each the sum over prompts and the mean over repeats.

        It is no mean of ratios.
        """
        return self.timing.mean(category) / timing.mean(category) * self.scale(timing, category)

    def scale(self, timing: Timing, category: str | None = None) -> float:
        """Output tokens / plain decoding's: not 1 where texts differ in length, as drawn ones do."""
        return timing.tokens(category) / self.timing.tokens(category)

    def interval(self, timing: Timing, category: str | None = None) -> tuple[float, float] | None:
        """95 % confidence interval of the speed-up: Student's t on the logarithms of the paired repeats' ratios.

        None without at least two pairs.
        """
        if not self.paired or len(timing.repeats) < 2:
            return None
        pairs = zip(self.timing.each(category), timing.each(category), strict=True)
        scale = self.scale(timing, category)
        logs = [math.log(plain / seconds * scale) for plain, seconds in pairs]
        half, centre = student_t(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs)), fmean(logs)
        return math.exp(centre - half), math.exp(centre + half)


def acceptance_facts(counts: RequestMetrics) -> dict[str, Any]:
    """Acceptance of a run or a category, under the names of the engine's own metrics."""
    return {
        "mean_acceptance_length": counts.mean_acceptance_length,
        "tokens_per_target_step": counts.tokens_per_target_step,
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "acceptance_per_position": counts.acceptance_per_position,
        "conditional_acceptance_per_position": counts.conditional_acceptance_per_position,
        "drafted_per_position": counts.drafted_per_position,
        "drafted_step_share": counts.num_drafts / counts.num_steps,
        "num_target_steps": counts.num_steps,
        "num_drafts": counts.num_drafts,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "num_output_tokens": counts.num_committed_tokens,
        "drafted_trees": tree_facts(counts),
    }


def tree_facts(counts: RequestMetrics) -> dict[str, Any] | None:
    """Size, shape and use of the trees that were verified, on average. None means that drafts were chains."""
    if not counts.num_trees:
        return None
    num_levels = sum(depth * steps for (depth, _), steps in counts.outcomes.items())
    wasted = counts.num_draft_tokens - counts.num_accepted_tokens
    levels = sorted(counts.nodes_per_depth)
    return {
        "nodes": counts.num_draft_tokens / counts.num_drafts,
        "depth": num_levels / counts.num_drafts,
        "width": counts.num_draft_tokens / num_levels,
        "nodes_per_depth": [counts.nodes_per_depth[depth] / counts.num_trees for depth in levels],
        "accepted_depth": counts.num_accepted_tokens / counts.num_drafts,
        "wasted_nodes": wasted,
        "wasted_share": wasted / counts.num_draft_tokens,
    }


def timing_facts(
    timing: Timing, baseline: Baseline | None, num_tokens: int, category: str | None = None
) -> dict[str, Any]:
    """Times of one repeat on average, and what follows from them."""
    seconds = timing.mean(category)
    plain = baseline.timing.mean(category) if baseline else None
    return {
        "seconds": seconds,
        "baseline_seconds": plain,
        "speedup": baseline.speedup(timing, category) if baseline else None,
        "speedup_interval": baseline.interval(timing, category) if baseline else None,
        "tokens_per_second": num_tokens / seconds,
        "baseline_tokens_per_second": baseline.timing.tokens(category) / plain if baseline and plain else None,
    }


def run_facts(repeats: Sequence[Sequence[Pass]], baseline: Baseline | None) -> dict[str, Any]:
    """Everything that timing and counting give. Counts are those of the first repeat: the others say the same."""
    first, timing = repeats[0], Timing.of(repeats)
    total = acceptance_facts(merged_acceptance(first))
    by_category = {}
    for each in first:
        counted = acceptance_facts(each.acceptance)
        timed = timing_facts(timing, baseline, counted["num_output_tokens"], each.category)
        by_category[each.category] = {"num_prompts": len(each.outputs)} | timed | counted
    return {
        **timing_facts(timing, baseline, total["num_output_tokens"]),
        **total,
        **break_even_facts(timing.mean(), baseline.timing.mean() * baseline.scale(timing) if baseline else None, total),
        "proposer_propose_calls": sum(each.num_propose_calls for each in first),
        "by_category": by_category,
        "time_shares": time_shares([each for passes in repeats for each in passes]),
        "repeats": _raw_times(timing, baseline),
    }


def break_even_facts(seconds: float, plain_seconds: float | None, total: Mapping[str, Any]) -> dict[str, float | None]:
    """How long a request's step takes, and where speculation would just pay for itself.

    In tokens: with the rows that it has. In rows: with the tokens that it has, if each row costs as much as those it
    has cost on average, drafting included.

    plain_seconds: of as many tokens by plain decoding. None means unknown. total: of `acceptance_facts`.
    """
    step = seconds / total["num_target_steps"]
    plain = plain_seconds / total["num_output_tokens"] if plain_seconds else None
    rows, tokens = 1 + total["num_draft_tokens"] / total["num_target_steps"], total["tokens_per_target_step"]
    per_row = (step - plain) / (rows - 1) if plain and rows > 1 else 0.0
    return {
        "step_seconds": step,
        "plain_step_seconds": plain,
        "break_even_tokens_per_step": step / plain if plain else None,
        "rows_per_step": rows,
        "break_even_rows_per_step": 1 + (tokens - 1) * plain / per_row if plain and per_row > 0 else None,
    }


def time_shares(passes: Sequence[Pass]) -> dict[str, float] | None:
    """The share of each stage in the time of all passes; "other" is what no stage covers. None without a profile."""
    names = dict.fromkeys(stage for each in passes for stage in each.stage_seconds)
    if not names:
        return None
    stages = {stage: sum(each.stage_seconds.get(stage, 0.0) for each in passes) for stage in names}
    seconds = sum(each.seconds for each in passes)
    stages["other"] = seconds - sum(stages.values())
    return {stage: spent / seconds for stage, spent in stages.items()}


def _raw_times(timing: Timing, baseline: Baseline | None) -> list[dict[str, Any]]:
    plain = baseline.timing.repeats if baseline and baseline.paired else None
    return [
        {
            "seconds": sum(repeat.values()),
            "baseline_seconds": sum(plain[number].values()) if plain else None,
            "by_category": {
                name: {"seconds": seconds, "baseline_seconds": plain[number][name] if plain else None}
                for name, seconds in repeat.items()
            },
        }
        for number, repeat in enumerate(timing.repeats)
    ]


def equality_facts(differences: Sequence[Difference] | None, num_prompts: int, tokenizer: Any) -> dict[str, Any]:
    """Whether outputs equal plain decoding's; None where that was not asked."""
    if differences is None:
        return {"outputs_equal": None, "num_outputs_equal": None, "differences": None}
    return {
        "outputs_equal": not differences,
        "num_outputs_equal": num_prompts - len(differences),
        "differences": [difference.as_dict(tokenizer) for difference in differences],
    }


def request_facts(prompts: Sequence[BenchPrompt], passes: Sequence[Pass]) -> list[dict[str, Any]]:
    """One row per prompt, with what it gave in these passes; how it was drafted under vLLM's per-request names."""
    runs = {name: each for each in passes for name in each.outputs}
    return [
        {
            "prompt_id": prompt.prompt_id,
            "category": prompt.category,
            "num_prompt_tokens": len(prompt.token_ids),
            "output_token_ids": runs[prompt.prompt_id].outputs[prompt.prompt_id],
            **step_facts(runs[prompt.prompt_id].steps.get(prompt.prompt_id, ())),
        }
        for prompt in prompts
    ]


def step_facts(steps: Sequence[Step]) -> dict[str, Any]:
    """A request's steps in their order, plain ones included, and how many drafted ones accepted 0, 1, ... tokens."""
    drafted = [step for step in steps if step.draft_token_ids]
    histogram = Counter(step.num_accepted for step in drafted)
    width = max((len(step.widths or step.draft_token_ids) for step in drafted), default=0) + 1
    parents = [None if step.parents is None else list(step.parents) for step in steps]
    return {
        "acceptance_histogram": [histogram[count] for count in range(width)],
        "per_step_accepted": [step.num_accepted for step in steps],
        "per_step_drafted": [len(step.draft_token_ids) for step in steps],
        "per_step_draft_token_ids": [list(step.draft_token_ids) for step in steps],
        **({"per_step_draft_parents": parents} if any(parents) else {}),
    }
