"""Drafters that run on the device: a random EAGLE-3 of the large model's size, and the small model as a draft model.

A pass of a drafter is what one more draft token costs: the difference between drafts of several tokens and of one.
"""

from __future__ import annotations

import statistics
from typing import Any

from specdec import LLM
from specdec.core.host import parts_of

from . import figures
from .run import Run, weight_bytes

TARGET, SMALL = "8B", "1B"
NUMBERS = (5, 3, 1)  # of draft tokens, in the order of their worth
METHODS = {
    "EAGLE-3": "specdec.plugins.eagle.proposer:Eagle3Proposer",
    "draft model": "specdec.plugins.draft_model.proposer:DraftModelProposer",
}


def greedy(run: Run) -> None:
    """Drafts of the most likely tokens."""
    _sweep(run, "greedy", {})


def probabilistic(run: Run) -> None:
    """Drawn drafts with their distributions, verified at temperature 0.8."""
    _sweep(run, "probabilistic", {"temperature": 0.8, "seed": 3})


def _sweep(run: Run, sampling: str, params: dict[str, Any]) -> None:
    bandwidth = run.bandwidth()
    for name, method in METHODS.items():
        folder = run.eagle3(TARGET) if name == "EAGLE-3" else run.checkpoint(SMALL)
        drafting: dict[tuple[int, int], float] = {}
        for number in NUMBERS:
            if run.is_late():
                run.figures.put(f"{name}, {sampling}: left out for want of time, from draft tokens", number)
                break
            speculation = {"method": method, "model": str(folder), "num_speculative_tokens": number}
            with run.engine(TARGET, speculative_config=speculation | {"draft_sample_method": sampling}) as llm:
                for batch in run.shape(TARGET).batch_sizes:
                    drafting[number, batch] = _put(run, llm, f"{name}, {sampling}, {number} tokens", batch, params)
                _put_acceptance(run, llm, f"{name}, {sampling}, {number} tokens")
            del llm  # before the next one is made
        _put_passes(run, f"{name}, {sampling}", drafting, weight_bytes(folder) / bandwidth)


def _put(run: Run, llm: LLM, what: str, batch: int, params: dict[str, Any]) -> float:
    """Median seconds of a step's drafting."""
    progress = parts_of(llm.engine).runner.progress
    plain, taken = progress.propose, []

    def timed(*args: Any, **kwargs: Any) -> None:
        taken.append(run.seconds(lambda: plain(*args, **kwargs)))

    run.steps(llm, TARGET, batch, **params)  # kernels are compiled and passes recorded
    steps = run.steps(llm, TARGET, batch, **params)
    progress.propose = timed
    run.steps(llm, TARGET, batch, **params)
    del progress.propose
    run.figures.put(f"{what}, batch {batch}: a step, us", 1e6 * statistics.median(steps))
    run.figures.put(f"{what}, batch {batch}: its drafting, us", 1e6 * statistics.median(taken))
    return statistics.median(taken)


def _put_acceptance(run: Run, llm: LLM, what: str) -> None:
    run.figures.put(f"{what}: acceptance length", llm.engine.metrics.acceptance.mean_acceptance_length)


def _put_passes(run: Run, what: str, drafting: dict[tuple[int, int], float], floor: float) -> None:
    """floor: seconds in which the drafter's weights are read once."""
    numbers = [number for number, _ in drafting] or [1]
    one, most = min(numbers), max(numbers)
    for batch in run.shape(TARGET).batch_sizes:
        if most == one or (most, batch) not in drafting:
            continue
        spent = (drafting[most, batch] - drafting[one, batch]) / (most - one)
        run.figures.put(f"{what}, batch {batch}: a draft pass, us", 1e6 * spent)
        if batch == 1:
            is_the_goals = what == "EAGLE-3, greedy"
            named = figures.EAGLE_PASS if is_the_goals else f"{what}, batch 1: a draft pass over its floor"
            run.figures.put(named, spent / floor)
