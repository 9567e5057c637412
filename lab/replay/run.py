"""A replay from its settings to its result: what a proposer would have drafted, and what that would have taken."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.host import parts_of
from specdec.core.proposing.speculation import SpeculativeSettings
from specdec.core.registry import PluginSettings
from specdec.core.request.metrics import RequestMetrics

from ..measure import Step
from ..recording import RecordedRequest, Recording
from .assembly import ReplayEngine
from .clock import ProposeClock
from .expected import ExpectedAcceptance
from .playback import Listener


@dataclass
class Replayed:
    """What came of one proposer on a recording."""

    acceptance: RequestMetrics
    proposer: str | None = None  # None: plain decoding
    target: str | None = None  # its "module:Class"
    num_speculative_tokens: int = 0  # K; of trees, their depth
    steps: dict[str, list[Step]] = field(default_factory=partial(defaultdict, list))  # by request id
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by request id
    step_rows: list[int] = field(default_factory=list)  # tokens computed in each step of the engine
    rows_of: dict[str, list[int]] = field(default_factory=partial(defaultdict, list))  # the same by request id
    propose_seconds_of: dict[str, float] = field(default_factory=partial(defaultdict, float))
    """By request id: the proposer's, without what other programs took."""
    num_calls_of: dict[str, float] = field(default_factory=partial(defaultdict, float))
    """By request id: steps of the engine, shared by the requests in them."""
    seconds: float = 0.0  # of the replay
    waited_share: float = 0.0  # of the proposer's time, what other programs took
    seconds_saved: float = 0.0  # of each step's proposing, because no target's pass emptied the processor's caches
    expected: ExpectedAcceptance | None = field(default=None, compare=False)  # None: no distribution was reported

    @property
    def propose_seconds(self) -> float:
        """The proposer's, of all requests."""
        return sum(self.propose_seconds_of.values())

    @property
    def live_propose_seconds(self) -> float:
        """What the proposer takes beside a target."""
        return sum(map(self.live_propose_seconds_of, self.propose_seconds_of))

    def live_propose_seconds_of(self, request_id: str) -> float:
        """The same of one request."""
        return self.propose_seconds_of[request_id] + self.seconds_saved * self.num_calls_of[request_id]

    def predicted_seconds(self, recording: Recording) -> float:
        """What a live run takes by the recorded cost. Raises ConfigError SD-E252 if none was recorded."""
        return sum(map(recording.manifest.cost.step_seconds, self.step_rows)) + self.live_propose_seconds


def replay(
    recording: Recording,
    speculative_config: SpeculativeSettings,
    plugins: PluginSettings | None = None,
    *,
    model: str | Path | None = None,
    device: str = "cpu",
    listener: Listener | None = None,
    temperature: float | None = None,
    teacher_forced: bool = False,
    most_requests: int | None = None,
) -> Replayed:
    """Run a proposer along a recording. Other arguments and errors as of `ReplayEngine`.

    listener: told of reported distributions. temperature: what the proposer is shown, without filters, in place of the
    recorded sampling parameters. teacher_forced: accept no draft, so that the proposer drafts at every position.
    most_requests: None means all of them.
    """
    with closing(ReplayEngine(recording, speculative_config, plugins, model=model, device=device)) as engine:
        playback, host = engine.playback, parts_of(engine).host
        playback.teacher_forced = teacher_forced
        if listener is not None:
            playback.listeners.append(listener)
        found, clock = Replayed(engine.metrics.acceptance), ProposeClock(engine.metrics.seconds)
        if host is not None:
            found.proposer, found.target = str(host.plugin), host.plugin.target
            found.num_speculative_tokens = host.loaded.config.num_draft_tokens
            parts_of(engine).plan.hooks.add(clock, "the clock of a replay")
        start = time.perf_counter()
        for _, turn in groupby(islice(recording, most_requests), key=lambda request: request.turn):
            for request in turn:
                params = params_of(recording, request)
                if temperature is not None:
                    params = params.replace(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
                engine.add_request(list(request.prompt_token_ids), params, request.request_id)
            while engine.has_unfinished_requests:
                _step(engine, clock, found)
        found.seconds = time.perf_counter() - start
        found.waited_share = clock.displaced / clock.wall if clock.wall else 0.0
        found.seconds_saved = playback.caches.seconds_saved
        found.expected = playback.expected if playback.expected.positions else None
        return found


def _step(engine: ReplayEngine, clock: ProposeClock, found: Replayed) -> None:
    """Take one step, and keep what came of it."""
    committed = engine.step()
    seconds = clock.step_ended() if found.proposer is not None else 0.0
    engine.playback.caches.proposed(seconds)
    for each in committed:
        request, name = each.request, each.request.request_id
        found.propose_seconds_of[name] += seconds / len(committed)
        found.num_calls_of[name] += 1 / len(committed)
        found.rows_of[name].append(each.num_rows)
        if each.token_ids:
            found.steps[name].append(Step.of(each))
        if request.finish_reason is not None:
            found.outputs[name] = tuple(request.output_token_ids)
    found.step_rows.append(sum(each.num_rows for each in committed))


def params_of(recording: Recording, request: RecordedRequest) -> SamplingParams:
    """The parameters under which it was recorded, so that it ends where it ended."""
    manifest = recording.manifest
    asked: dict[str, Any] = {"temperature": 0.0} | manifest.sampling | {"seed": request.seed, "detokenize": False}
    asked["structured_outputs"] = request.structured_outputs
    params = SamplingParams(**asked | {"stop": ()})
    ends = {*manifest.eos_token_ids, *params.stop_token_ids}
    if request.finish_reason == "stop" and request.token_ids[-1] in ends:
        return params
    return params.replace(max_tokens=len(request.token_ids))
