"""A replay from its settings to its result: what a proposer would have drafted, and what that would have taken."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.host import parts_of
from specdec.core.proposing.speculation import SpeculativeSettings
from specdec.core.registry import PluginSettings
from specdec.core.request.metrics import RequestMetrics
from specdec.core.request.request import Committed

from ..measure import Step
from ..recording import RecordedRequest, Recording
from .assembly import ReplayEngine
from .clock import ProposeClock
from .expected import ExpectedAcceptance
from .playback import Listener


@dataclass(frozen=True)
class Replayed:
    """What came of one proposer on a recording."""

    proposer: str | None  # None: plain decoding
    target: str | None  # its "module:Class"
    num_speculative_tokens: int  # K; of trees, their depth
    steps: Mapping[str, Sequence[Step]]  # by request id: those that sampled
    acceptance: RequestMetrics
    outputs: Mapping[str, tuple[int, ...]]  # by request id
    step_rows: tuple[int, ...]  # tokens computed in each step of the engine
    rows_of: Mapping[str, Sequence[int]]  # by request id: tokens computed for it in each of its steps
    seconds: float  # of the replay
    propose_seconds_of: Mapping[str, float]  # by request id: the proposer's, without what other programs took
    num_calls_of: Mapping[str, float]  # by request id: steps of the engine, shared by the requests in them
    waited_share: float  # of the proposer's time, what other programs took
    seconds_saved: float  # of each step's proposing, because no target's pass emptied the processor's caches
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
        engine.playback.teacher_forced = teacher_forced
        if listener is not None:
            engine.playback.listeners.append(listener)
        running = _Running(engine)
        start = time.perf_counter()
        for _, turn in groupby(islice(recording, most_requests), key=lambda request: request.turn):
            for request in turn:
                params = params_of(recording, request)
                if temperature is not None:
                    params = params.replace(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
                engine.add_request(list(request.prompt_token_ids), params, request.request_id)
            running.until_done()
        seconds = time.perf_counter() - start
        host, expected = parts_of(engine).host, engine.playback.expected
        return Replayed(
            proposer=str(host.plugin) if host else None,
            target=host.plugin.target if host else None,
            num_speculative_tokens=host.loaded.config.num_draft_tokens if host else 0,
            steps=running.steps,
            acceptance=engine.metrics.acceptance,
            outputs=running.outputs,
            step_rows=tuple(running.rows),
            rows_of=running.rows_of,
            seconds=seconds,
            propose_seconds_of=running.seconds,
            num_calls_of=running.num_calls,
            waited_share=running.clock.displaced / running.clock.wall if running.clock.wall else 0.0,
            seconds_saved=engine.playback.caches.seconds_saved,
            expected=expected if expected.positions else None,
        )


class _Running:
    """What is kept of the steps of a replay."""

    def __init__(self, engine: ReplayEngine) -> None:
        self._engine = engine
        self._drafts = parts_of(engine).host is not None
        self.clock = ProposeClock(engine.metrics.seconds)
        if self._drafts:
            parts_of(engine).plan.hooks.add(self.clock, "the clock of a replay")
        self.steps: defaultdict[str, list[Step]] = defaultdict(list)
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.rows: list[int] = []
        self.rows_of: defaultdict[str, list[int]] = defaultdict(list)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.num_calls: defaultdict[str, float] = defaultdict(float)

    def until_done(self) -> None:
        """Take every request to its end."""
        while self._engine.has_unfinished_requests:
            committed = self._engine.step()
            if self._drafts:
                self._share(committed, self.clock.step_ended())
            for each in committed:
                request = each.request
                self.rows_of[request.request_id].append(each.num_rows)
                if each.token_ids:
                    self.steps[request.request_id].append(Step.of(each))
                if request.finish_reason is not None:
                    self.outputs[request.request_id] = tuple(request.output_token_ids)
            self.rows.append(sum(each.num_rows for each in committed))

    def _share(self, committed: Sequence[Committed], seconds: float) -> None:
        self._engine.playback.caches.proposed(seconds)
        for each in committed:
            self.seconds[each.request.request_id] += seconds / len(committed)
            self.num_calls[each.request.request_id] += 1 / len(committed)


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
