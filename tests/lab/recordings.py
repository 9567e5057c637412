"""Recordings for tests, made once; live runs to hold replays against."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp

from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.engine import Engine
from specdec.core.registry import PluginSettings
from specdec.lab.measure import Step
from specdec.lab.recording import Recording
from specdec.lab.recording.recorder import record
from specdec.lab.recording.settings import RecordSettings
from specdec.lab.replay.run import params_of

LAYERS = (2, 4, 5, "final")


class Quiet:
    """Nobody is told."""

    def stage(self, name, num_requests=0):
        pass

    def finished(self, request):
        pass

    def written(self, num_bytes):
        pass


def settings(**changes) -> RecordSettings:
    engine = EngineConfig(model="tiny", device="cpu", max_num_seqs=changes.pop("max_num_seqs", 2))
    return RecordSettings(**{"engine": engine, "num_prompts": 3, "output_len": 24, "measure_cost": False} | changes)


def make(folder: Path, **changes) -> Recording:
    record(settings(**changes), PluginSettings(), folder, Quiet())
    return Recording.open(folder)


@cache
def shared(temperature: float = 0.0, full_logits: bool = False) -> Recording:
    """Two requests at a time, with the states that every packaged head needs."""
    folder = Path(mkdtemp(prefix="specdec-recording-"))
    return make(folder, temperature=temperature, hidden_states=LAYERS, full_logits=full_logits)


def live_steps(recording: Recording, speculative_config) -> tuple[dict[str, list[Step]], Engine]:
    """What the engine does to each recorded request with its target."""
    seats = recording.manifest.engine["max_num_seqs"]
    engine = Engine(EngineConfig(model="tiny", device="cpu", max_num_seqs=seats), speculative_config)
    steps = defaultdict(list)
    for request in recording:
        engine.add_request(list(request.prompt_token_ids), params_of(recording, request), request.request_id)
    while engine.has_unfinished_requests:
        for each in engine.step():
            if each.token_ids:
                steps[each.request.request_id].append(Step.of(each))
    return steps, engine


def drafts_at(replayed) -> dict[tuple[str, int], list[int]]:
    """The drafts of a replay by request and by the position of the step's first new token."""
    return {
        (request_id, position): list(step.draft_token_ids)
        for request_id, steps in replayed.steps.items()
        for position, step in zip(accumulate((step.num_committed for step in steps), initial=0), steps, strict=False)
    }
