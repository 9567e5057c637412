"""A replay from its settings to its result: what a proposer would have drafted, and what that would have taken."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.host import EngineView
from specdec.core.proposing.speculation import SpeculativeSettings
from specdec.core.registry import PluginSettings
from specdec.core.request.metrics import RequestMetrics
from specdec.core.request.request import Committed

from ..recording import RecordedRequest, Recording
from .assembly import ReplayEngine
from .expected import ExpectedAcceptance
from .playback import Listener


@dataclass(frozen=True)
class ReplayedStep:
    """What one step did to one request."""

    request_id: str
    position: int  # of its first new token, counted from the first output token
    draft_token_ids: tuple[int, ...]  # verified
    num_accepted: int
    token_ids: tuple[int, ...]  # committed
    parents: tuple[int, ...] | None = None  # of a tree's nodes, by their places in `draft_token_ids`; None: a chain

    @classmethod
    def of(cls, each: Committed) -> Self:
        """What the engine said of a step that committed a token."""
        position = each.length - len(each.token_ids) - each.request.num_prompt_tokens
        parents = None if each.tree is None else tuple(each.tree.shown_parents())
        facts = tuple(each.draft_token_ids), each.num_accepted, tuple(each.token_ids), parents
        return cls(each.request.request_id, position, *facts)


@dataclass(frozen=True)
class Replayed:
    """What came of one proposer on a recording."""

    proposer: str | None  # None: plain decoding
    target: str | None  # its "module:Class"
    num_speculative_tokens: int  # K; of trees, their depth
    steps: tuple[ReplayedStep, ...]  # those that sampled
    acceptance: RequestMetrics
    outputs: Mapping[str, tuple[int, ...]]  # by request id
    step_rows: tuple[int, ...]  # tokens computed in each step of the engine
    seconds: float  # of the replay
    propose_seconds: float  # of them, the proposer's
    seconds_saved: float  # of each step's proposing, because no target's pass emptied the processor's caches
    expected: ExpectedAcceptance | None = field(default=None, compare=False)  # None: no distribution was reported

    @property
    def live_propose_seconds(self) -> float:
        """What the proposer takes beside a target."""
        return self.propose_seconds + self.seconds_saved * len(self.step_rows)

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
) -> Replayed:
    """Run a proposer along a recording. Other arguments and errors as of `ReplayEngine`.

    listener: told of reported distributions. temperature: what the proposer is shown, without filters, in place of the
    recorded sampling parameters. teacher_forced: accept no draft, so that the proposer drafts at every position.
    """
    with closing(ReplayEngine(recording, speculative_config, plugins, model=model, device=device)) as engine:
        engine.playback.teacher_forced = teacher_forced
        if listener is not None:
            engine.playback.listeners.append(listener)
        steps: list[ReplayedStep] = []
        outputs: dict[str, tuple[int, ...]] = {}
        rows: list[int] = []
        start = time.perf_counter()
        for _, turn in groupby(recording, key=lambda request: request.turn):
            for request in turn:
                params = params_of(recording, request)
                if temperature is not None:
                    params = params.replace(temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)
                engine.add_request(list(request.prompt_token_ids), params, request.request_id)
            rows += _until_done(engine, steps, outputs)
        seconds = time.perf_counter() - start
        host, expected = EngineView.of(engine).host, engine.playback.expected
        return Replayed(
            proposer=str(host.plugin) if host else None,
            target=host.plugin.target if host else None,
            num_speculative_tokens=host.loaded.config.depth if host else 0,
            steps=tuple(steps),
            acceptance=engine.metrics.acceptance,
            outputs=outputs,
            step_rows=tuple(rows),
            seconds=seconds,
            propose_seconds=engine.metrics.seconds["propose"],
            seconds_saved=engine.playback.caches.seconds_saved,
            expected=expected if expected.positions else None,
        )


def _until_done(engine: ReplayEngine, steps: list[ReplayedStep], outputs: dict[str, tuple[int, ...]]) -> Iterator[int]:
    """Take every request to its end. Yields the rows of each step."""
    clock = engine.metrics.seconds
    while engine.has_unfinished_requests:
        before = clock["propose"]
        committed = engine.step()
        engine.playback.caches.proposed(clock["propose"] - before)
        for each in committed:
            request = each.request
            if each.token_ids:
                steps.append(ReplayedStep.of(each))
            if request.finish_reason is not None:
                outputs[request.request_id] = tuple(request.output_token_ids)
        yield sum(each.num_rows for each in committed)


def params_of(recording: Recording, request: RecordedRequest) -> SamplingParams:
    """The parameters under which it was recorded, so that it ends where it ended."""
    manifest = recording.manifest
    asked: dict[str, Any] = {"temperature": 0.0} | manifest.sampling | {"seed": request.seed, "detokenize": False}
    params = SamplingParams(**asked | {"stop": ()})
    ends = {*manifest.eos_token_ids, *params.stop_token_ids}
    if request.finish_reason == "stop" and request.token_ids[-1] in ends:
        return params
    return params.replace(max_tokens=len(request.token_ids))
