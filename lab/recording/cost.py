"""The cost of a step against its rows: measured once, so that a replay can say what a live run takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine

from .manifest import Cost
from .tap import MOST_DRAFTS, RecordingTap

NUM_DRAFTS = (0, 1, 2, 4, 8, MOST_DRAFTS)
STEPS = 16
REPEATS = 2


def measure_cost(engine: Engine, tap: RecordingTap, prompts: Sequence[Sequence[int]]) -> Cost:
    """Of an engine that profiles, with its first prompts at once. The time of proposing is left out."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    taken = prompts[: engine.config.max_num_seqs]
    for repeat in range(REPEATS + 1):
        for num_drafts in NUM_DRAFTS:
            tap.num_drafts = num_drafts
            timed = _run(engine, taken, num_drafts)
            for num_rows, each in timed if repeat else ():  # the first warms up
                seconds[num_rows].append(each)
    tap.num_drafts = 0
    rows = sorted(seconds)
    return Cost(rows=tuple(rows), seconds=tuple(median(seconds[count]) for count in rows))


def _run(engine: Engine, prompts: Sequence[Sequence[int]], num_drafts: int) -> list[tuple[int, float]]:
    """Rows and seconds of each step."""
    for number, prompt in enumerate(prompts):
        room = engine.parts.info.max_model_len - len(prompt)
        params = SamplingParams(
            temperature=0, max_tokens=min(STEPS * (num_drafts + 1), room), ignore_eos=True, detokenize=False
        )
        engine.add_request(list(prompt), params, f"cost-{number}")
    timed = []
    clock = engine.metrics.seconds
    for _ in range(STEPS):
        before, start = clock["propose"], time.perf_counter()
        committed = engine.step()
        if not committed:
            break
        passed = time.perf_counter() - start - (clock["propose"] - before)
        timed.append((sum(each.num_rows for each in committed), passed))
    for number in range(len(prompts)):
        engine.abort(f"cost-{number}")
    return timed
