"""Timing: the same prompts through two engines in turn, several times over."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

from specdec.core.engine.engine import Engine
from specdec.core.request.metrics import RequestMetrics
from specdec.core.request.request import Request

from .prompts import BenchPrompt

OnFinished = Callable[[Request], None]


@dataclass(frozen=True)
class Pass:
    """What one engine did with the prompts of one category."""

    category: str
    seconds: float
    outputs: dict[str, tuple[int, ...]]  # prompt id -> output token ids
    acceptance: RequestMetrics
    num_propose_calls: int
    stage_seconds: dict[str, float]  # empty unless the engine profiles


@dataclass(frozen=True)
class Repeat:
    """All prompts once through each engine, one pass per category."""

    passes: tuple[Pass, ...]
    baseline: tuple[Pass, ...]  # empty without a baseline


class TimedEngine:
    """An engine that is timed, and rebuilt where it would otherwise profit from having seen the prompts."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self.engine = build()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def forget(self) -> None:
        """Start anew if the proposer keeps what it learns across requests: repeats must not help each other."""
        host = self.engine.parts.host
        if host is not None and host.needs.state == "shared":
            self.engine.close()
            self.engine = self._build()

    def warm_up(self, prompts: Sequence[BenchPrompt]) -> None:
        """Run the prompts backwards: the shapes to be measured, without a text that could be remembered."""
        for prompt in prompts:
            self.engine.add_request(prompt.token_ids[::-1], prompt.params)
        while self.engine.has_unfinished_requests:
            self.engine.step()

    def run(self, prompts: Sequence[BenchPrompt], on_finished: OnFinished) -> Pass:
        """All prompts at once, as far as the engine runs requests at the same time."""
        metrics = self.engine.metrics
        acceptance, counts = copy.deepcopy(metrics.acceptance), metrics.counts.copy()
        stages = metrics.seconds.copy()
        outputs: dict[str, tuple[int, ...]] = {}
        start = time.perf_counter()
        for prompt in prompts:
            self.engine.add_request(prompt.token_ids, prompt.params, prompt.prompt_id)
        while self.engine.has_unfinished_requests:
            for each in self.engine.step():
                if each.request.finish_reason is not None:
                    outputs[each.request.request_id] = tuple(each.request.output_token_ids)
                    on_finished(each.request)
        seconds = time.perf_counter() - start
        return Pass(
            category=prompts[0].category,
            seconds=seconds,
            outputs=outputs,
            acceptance=_since(metrics.acceptance, acceptance),
            num_propose_calls=metrics.counts["proposer_propose_calls"] - counts["proposer_propose_calls"],
            stage_seconds={stage: total - stages[stage] for stage, total in metrics.seconds.items()},
        )


def measure(
    engine: TimedEngine,
    baseline: TimedEngine | None,
    prompts: Sequence[BenchPrompt],
    *,
    num_repeats: int,
    num_warmup: int,
    on_finished: OnFinished,
) -> list[Repeat]:
    """Run prompts, grouped by category, `num_repeats` times through both engines, which take turns in going first."""
    groups = [list(group) for _, group in groupby(prompts, key=lambda prompt: prompt.category)]
    both = [engine] if baseline is None else [engine, baseline]
    for timed in both:
        timed.warm_up(prompts[:num_warmup])
    repeats = []
    for repeat in range(num_repeats):
        engine.forget()
        passes: dict[TimedEngine, list[Pass]] = {timed: [] for timed in both}
        for number, group in enumerate(groups):
            for timed in both if (repeat + number) % 2 else reversed(both):
                passes[timed].append(timed.run(group, on_finished))
        repeats.append(Repeat(tuple(passes[engine]), tuple(passes[baseline]) if baseline else ()))
    return repeats


def outputs_of(passes: Sequence[Pass]) -> dict[str, tuple[int, ...]]:
    """Output token ids by prompt id."""
    return {prompt_id: output for each in passes for prompt_id, output in each.outputs.items()}


def merged_acceptance(passes: Sequence[Pass]) -> RequestMetrics:
    """The counts of several passes together."""
    total = RequestMetrics()
    for each in passes:
        total.merge(each.acceptance)
    return total


def merged_stages(passes: Sequence[Pass]) -> dict[str, float]:
    """Seconds by stage of several passes together."""
    total: Counter[str] = Counter()
    for each in passes:
        total.update(each.stage_seconds)
    return dict(total)


def _since(now: RequestMetrics, before: RequestMetrics) -> RequestMetrics:
    names = [field.name for field in fields(RequestMetrics)]
    return RequestMetrics(**{name: getattr(now, name) - getattr(before, name) for name in names})
