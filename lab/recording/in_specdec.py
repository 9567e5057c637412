"""Recording from our own engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine, finish_reason_of
from specdec.core.host import parts_of
from specdec.core.registry import PluginSettings
from specdec.core.request.request import Request

from ..conversation import Texts
from ..environment import environment
from . import fingerprint
from .cost import measure_cost
from .manifest import Cost, Manifest, plain
from .settings import RecordSettings
from .source import Ended, Kept, Source
from .tap import MOST_DRAFTS, TAP, ProbabilityTap, RecordingTap


class EngineSource(Source):
    """Runs our engine, with the taps as its proposer and as a listener."""

    measures_cost = True
    takes_grammars = True

    def __init__(self, settings: RecordSettings, plugins: PluginSettings) -> None:
        """Raises what an engine raises."""
        tap = {"method": TAP, "num_speculative_tokens": MOST_DRAFTS}
        tap["proposer_config"] = {"hidden_states": settings.hidden_states}
        self._engine = Engine(settings.engine.replace(enable_profiling=True), tap, plugins)
        self._parts = parts_of(self._engine)
        self._listener = ProbabilityTap(settings.top_m, settings.full_logits)
        self._parts.plan.hooks.add(self._listener, "record")
        assert self._parts.host is not None, "the tap is a proposer"
        tap_itself = self._parts.host.proposer
        assert isinstance(tap_itself, RecordingTap)
        self._tap = tap_itself
        self.texts = Texts.of(self._engine)
        self.manifest = self._manifest(settings)

    def _manifest(self, settings: RecordSettings) -> Manifest:
        info = self._parts.plan.info
        blocks = {"num_kv_blocks": self._parts.cache.scheduler.pool.num_blocks, "max_model_len": info.max_model_len}
        return Manifest(
            model=str(settings.engine.model),
            model_fingerprint=fingerprint.of_model(info.checkpoint_dir, info.config),
            tokenizer_fingerprint=fingerprint.of_tokenizer(self._engine.tokenizer),
            target=plain(asdict(info) | {"config": dict(info.config)}),
            engine=plain(settings.engine.model_dump(mode="json") | blocks | {"device": info.device}),
            eos_token_ids=tuple(sorted(self._parts.model.eos_token_ids)),
        )

    @property
    def has_unfinished_requests(self) -> bool:
        return self._engine.has_unfinished_requests

    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, kept: bool = True) -> None:
        if kept:
            self._listener.params[request_id] = params
        self._engine.add_request(list(token_ids), params, request_id)

    def step(self) -> Sequence[Ended]:
        committed = self._engine.step()
        if self._listener.error is not None:
            raise self._listener.error
        ended = [_ended(each.request) for each in committed if each.request.finish_reason is not None]
        for each in ended:
            if each.request_id not in self._listener.params:
                self._tap.take(each.request_id)  # what is past an end: nobody asks for its states
        return ended

    def take(self, request_id: str) -> Kept:
        probabilities, logits = self._listener.take(request_id)
        return Kept(probabilities, self._tap.take(request_id), logits)

    def measure_cost(self, prompts: Sequence[Sequence[int]]) -> Cost:
        return measure_cost(self._engine, self._tap, prompts)

    def environment(self) -> dict[str, Any]:
        return environment(self._parts.model.target.device) | {"threads": self._parts.model.threads.count}

    def close(self) -> None:
        self._engine.close()


def _ended(request: Request) -> Ended:
    reason = finish_reason_of(request) or "abort"
    return Ended(request.request_id, tuple(request.output_token_ids), reason, request.metrics)
