"""The cost of a step against its rows: measured once, so that a replay can say what a live run takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import median

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine
from specdec.core.host import parts_of

from .manifest import Cost
from .monotone import pooled
from .tap import MOST_DRAFTS, RecordingTap

NUM_DRAFTS = (0, 1, 2, 4, 8, MOST_DRAFTS)
CYCLES = 3
LENGTHS = 6  # of prompts that are measured, from the shortest to the longest
ROUNDS = 2  # each of them so often
Prompts = Sequence[Sequence[int]]


def measure_cost(engine: Engine, tap: RecordingTap, prompts: Prompts) -> Cost:
    """Time the steps of an engine that profiles, on prompts of all lengths. The time of proposing is left out.

    Numbers of drafts take turns from step to step, and lengths from run to run, so that a busy moment of the machine
    touches all of them. The seconds never fall with the rows: where a median does, noise made it.
    """
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    groups = measured_groups(prompts, engine.config.max_num_seqs)
    for repeat, group in enumerate([groups[0], *islice(cycle(groups), LENGTHS * ROUNDS)]):
        for num_rows, each in _run(engine, tap, group):
            if repeat:  # the first warms up
                seconds[num_rows].append(each)
    tap.num_drafts = 0
    rows = sorted(seconds)
    medians = [median(seconds[count]) for count in rows]
    return Cost(rows=tuple(rows), seconds=pooled(medians, [len(seconds[count]) for count in rows]))


def measured_groups(prompts: Prompts, seats: int) -> list[Prompts]:
    """Choose prompts that run at the same time, `seats` of them: groups evenly spread over all lengths.

    The shortest prompts are in the first group, and the longest ones in the last.
    """
    ascending = sorted(prompts, key=len)
    starts = range(max(len(ascending) - seats, 0) + 1)
    chosen = {starts[round(place * (len(starts) - 1) / (LENGTHS - 1))] for place in range(LENGTHS)}
    return [ascending[start : start + seats] for start in sorted(chosen)]


def _run(engine: Engine, tap: RecordingTap, prompts: Prompts) -> list[tuple[int, float]]:
    """Run the prompts. Returns each step's number of rows and its seconds without proposing."""
    for number, prompt in enumerate(prompts):
        room = parts_of(engine).plan.info.max_model_len - len(prompt)
        params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True, detokenize=False)
        engine.add_request(list(prompt), params, f"cost-{number}")
    timed = []
    clock = engine.metrics.seconds
    for tap.num_drafts in islice(cycle(NUM_DRAFTS), CYCLES * len(NUM_DRAFTS)):
        before, start = clock["propose"], time.perf_counter()
        committed = engine.step()
        if not committed:
            break
        passed, proposing = time.perf_counter() - start, clock["propose"] - before
        timed.append((sum(each.num_rows for each in committed), passed - proposing))
    for number in range(len(prompts)):
        engine.abort(f"cost-{number}")
        tap.take(f"cost-{number}")
    return timed
