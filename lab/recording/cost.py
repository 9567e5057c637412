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
from .tap import MOST_DRAFTS, RecordingTap

NUM_DRAFTS = (0, 1, 2, 4, 8, MOST_DRAFTS)
CYCLES = 8
GROUPS = 4  # of prompts, each as many as run at the same time


def measure_cost(engine: Engine, tap: RecordingTap, prompts: Sequence[Sequence[int]]) -> Cost:
    """Time the steps of an engine that profiles, on its first prompts. The time of proposing is left out.

    Numbers of drafts take turns from step to step, so that a busy moment of the machine touches all of them.
    """
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    seats = engine.config.max_num_seqs
    groups = [prompts[first : first + seats] for first in range(0, len(prompts), seats)][:GROUPS]
    for repeat, group in enumerate([groups[0], *islice(cycle(groups), GROUPS)]):
        for num_rows, each in _run(engine, tap, group):
            if repeat:  # the first warms up
                seconds[num_rows].append(each)
    tap.num_drafts = 0
    rows = sorted(seconds)
    medians = tuple(median(seconds[count]) for count in rows)
    return Cost(rows=tuple(rows), seconds=medians)


def _run(engine: Engine, tap: RecordingTap, prompts: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Run the prompts. Returns each step's number of rows and its seconds without proposing."""
    for number, prompt in enumerate(prompts):
        room = parts_of(engine).info.max_model_len - len(prompt)
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
    return timed
