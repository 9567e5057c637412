"""Timing: the same prompts through several engines in turn, several times over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from specdec.core.engine.engine import Engine
from specdec.core.host import parts_of
from specdec.core.request.metrics import RequestMetrics
from specdec.core.request.request import Committed, Request
from specdec.core.request.verified_tree import VerifiedTree

from .prompts import BenchPrompt

OnFinished = Callable[[RequestMetrics], None]


class Step(NamedTuple):
    """What one target step did to one request."""

    draft_token_ids: Sequence[int]  # verified; of a tree, the accepted path first
    num_accepted: int
    num_committed: int
    parents: Sequence[int] | None = None  # of a tree's nodes, by their places in `draft_token_ids`; None: a chain

    @classmethod
    def of(cls, committed: Committed) -> Step:
        """What the engine said."""
        parents = None if committed.tree is None else committed.tree.shown_parents()
        return cls(committed.draft_token_ids, committed.num_accepted, len(committed.token_ids), parents)

    @property
    def widths(self) -> list[int] | None:
        """Nodes of a tree at each depth. None means a chain."""
        return None if self.parents is None else VerifiedTree([], self.parents).widths


@dataclass(frozen=True)
class Pass:
    """What one engine did with prompts of one category that ran together."""

    category: str
    seconds: float
    outputs: dict[str, tuple[int, ...]]  # prompt id -> output token ids
    acceptance: RequestMetrics  # of all prompts
    num_propose_calls: int
    stage_seconds: dict[str, float]  # empty unless the engine profiles
    steps: dict[str, list[Step]] = field(default_factory=dict)  # prompt id -> those that committed a token


class TimedEngine:
    """An engine that is timed, and rebuilt where it would otherwise profit from having seen the prompts."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self.engine = build()

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def forget(self, prompts: Sequence[BenchPrompt]) -> None:
        """Start anew if the proposer keeps what it learns across requests: repeats must not help each other.

        prompts: what warms a new engine up.
        """
        host = parts_of(self.engine).host
        if host is not None and host.needs.state == "shared":
            self.engine.close()
            self.engine = self._build()
            self.warm_up(prompts)
        self.engine.reset_prefix_cache()

    def warm_up(self, prompts: Sequence[BenchPrompt]) -> None:
        """Run the prompts backwards: the shapes to be measured, without a text that could be remembered."""
        for prompt in prompts:
            self.engine.add_request(prompt.token_ids[::-1], prompt.params)
        while self.engine.has_unfinished_requests:
            self.engine.step()

    def run(self, prompts: Sequence[BenchPrompt], on_finished: OnFinished) -> Pass:
        """All prompts at once, as far as the engine runs requests at the same time."""
        metrics = self.engine.metrics
        calls, stages = metrics.counts["proposer_propose_calls"], metrics.seconds.copy()
        ended: dict[str, Request] = {}
        steps: dict[str, list[Step]] = {prompt.prompt_id: [] for prompt in prompts}
        start = time.perf_counter()
        for prompt in prompts:
            self.engine.add_request(prompt.token_ids, prompt.params, prompt.prompt_id)
        while self.engine.has_unfinished_requests:
            for each in self.engine.step():
                request = each.request
                if each.token_ids:
                    steps[request.request_id].append(Step.of(each))
                if request.finish_reason is not None:
                    ended[request.request_id] = request
                    on_finished(request.metrics)
        seconds = time.perf_counter() - start
        return Pass(
            category=prompts[0].category,
            seconds=seconds,
            outputs={name: tuple(request.output_token_ids) for name, request in ended.items()},
            acceptance=summed(request.metrics for request in ended.values()),
            num_propose_calls=metrics.counts["proposer_propose_calls"] - calls,
            stage_seconds={stage: total - stages[stage] for stage, total in metrics.seconds.items()},
            steps=steps,
        )


def take_turns(
    engines: Sequence[TimedEngine],
    groups: Sequence[Sequence[BenchPrompt]],
    *,
    num_repeats: int,
    num_warmup: int,
    on_finished: OnFinished,
) -> list[list[tuple[Pass, ...]]]:
    """Run each group of prompts through every engine, `num_repeats` times; each engine goes first in its turn.

    Returns the passes by repeat and then by engine, one for each group.
    """
    warming = [prompt for group in groups for prompt in group][:num_warmup]
    for timed in engines:
        timed.warm_up(warming)
    repeats = []
    for repeat in range(num_repeats):
        for timed in engines:
            timed.forget(warming)
        passes: list[list[Pass]] = [[] for _ in engines]
        for number, group in enumerate(groups):
            for place in range(len(engines)):
                index = (place - repeat - number - 1) % len(engines)
                passes[index].append(engines[index].run(group, on_finished))
        repeats.append([tuple(each) for each in passes])
    return repeats


def units_of(prompts: Sequence[BenchPrompt], size: int | None = None) -> list[list[BenchPrompt]]:
    """Prompts of one category, `size` of them at a time. None means all."""
    groups = [list(group) for _, group in groupby(prompts, key=lambda prompt: prompt.category)]
    most = size or len(prompts)
    return [group[start : start + most] for group in groups for start in range(0, len(group), most)]


def outputs_of(passes: Sequence[Pass]) -> dict[str, tuple[int, ...]]:
    """Output token ids by prompt id."""
    return {prompt_id: output for each in passes for prompt_id, output in each.outputs.items()}


def counts_of(steps: Iterable[Step]) -> RequestMetrics:
    """What a request's metrics would say of these steps."""
    counts = RequestMetrics()
    for step in steps:
        counts.record(len(step.draft_token_ids), step.num_accepted, step.num_committed, step.widths)
    return counts


def summed(counts: Iterable[RequestMetrics]) -> RequestMetrics:
    """Counts together."""
    total = RequestMetrics()
    for each in counts:
        total.merge(each)
    return total


def merged_acceptance(passes: Sequence[Pass]) -> RequestMetrics:
    """The counts of several passes together."""
    return summed(each.acceptance for each in passes)
