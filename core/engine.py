"""The engine: takes requests, steps them all together, gives back what happened."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from specdec.sdk import RequestError, StepStats

from .assembly import Parts, assemble
from .detokenizer import Detokenizer
from .engine_config import EngineConfig
from .exporters import PROMETHEUS, export
from .metrics import Metric
from .registry import PluginSettings
from .request import FinishReason, Request
from .runner.committed import Committed
from .sampling_params import SamplingParams
from .speculation import SpeculativeSettings

Prompt = str | Sequence[int] | Mapping[str, Any]


class Engine:
    """Continuous batching over one target and at most one proposer. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        config: EngineConfig,
        speculative_config: SpeculativeSettings = None,
        plugin_settings: PluginSettings | None = None,
    ) -> None:
        """`plugin_settings`: which plugins may load; None: as the environment says (SPECDEC_PLUGINS, ...)."""
        settings = plugin_settings or PluginSettings.from_environment(os.environ)
        self.parts: Parts = assemble(config, speculative_config, settings)
        self.config = config
        self.tokenizer = self.parts.tokenizer
        self.metrics = self.parts.metrics
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._closed = False
        self.parts.observers.on_engine_start(self)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a prompt: text, token ids, or {"prompt": ...} or {"prompt_token_ids": ...}. Returns its id.

        Raises RequestError, naming the request, if it can never be served; nothing is queued then.
        """
        if self._closed:
            raise RequestError("SD-E169", "the engine is closed and takes no requests", {"fix": "make a new one"})
        params = params or SamplingParams()
        if request_id is None:
            request_id = next(name for name in map(str, count(self._num_added)) if name not in self._requests)
        if request_id in self._requests:
            raise RequestError("SD-E151", f"request id {request_id!r} is in use")
        text, token_ids = self._read_prompt(prompt, request_id)
        self._check_request(token_ids, params, request_id)
        seed = params.seed
        if seed is None:
            seed = random.Random(f"{self.config.seed}:{self._num_added}").getrandbits(63)
        needs_text = params.detokenize and self.tokenizer is not None
        stop_ids = frozenset(params.stop_token_ids)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            max_total_tokens=min(len(token_ids) + params.max_tokens, self.parts.info.max_model_len),
            end_token_ids=stop_ids if params.ignore_eos else stop_ids | self.parts.eos_token_ids,
            detokenizer=Detokenizer(self.tokenizer, params.stop, params.skip_special_tokens) if needs_text else None,
            prompt=text,
        )
        self._num_added += 1
        self._requests[request_id] = request
        self.parts.scheduler.add(request)
        return request_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises RequestError SD-E153 if there is no tokenizer."""
        if self.tokenizer is None:
            facts = {"fix": "pass prompt_token_ids, or LLM(tokenizer=...)"}
            raise RequestError("SD-E153", "the prompt is text, and the model has no tokenizer", facts)
        return list(self.tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the tokenizer's template. Raises RequestError SD-E159 if it has none."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise RequestError("SD-E159", "chat needs a tokenizer with a chat template; this model has none")
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def get_request(self, request_id: str) -> Request:
        """A queued or running request. Raises KeyError if there is none of this id."""
        return self._requests[request_id]

    def step(self) -> list[Committed]:
        """Advance all requests by one step. Returns what was committed to each; finished requests are gone then."""
        if not self._requests:
            return []
        starting: list[Request] = []
        if self.parts.observers.wants("on_request_start"):
            starting = [request for request in self._requests.values() if not request.started]
        try:
            with self.parts.threads.used():
                committed, stats = self.parts.runner.step()
        except BaseException:  # a proposer may stop a step that has ended requests
            self._forget_ended(list(self._requests.values()))
            raise
        self._forget_ended([each.request for each in committed])
        self._tell_observers(starting, committed, stats)
        return committed

    def _forget_ended(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.finish_reason is not None:
                self._requests.pop(request.request_id, None)  # an observer may have aborted it

    def _tell_observers(self, starting: Sequence[Request], committed: Sequence[Committed], stats: StepStats) -> None:
        observers = self.parts.observers
        for request in starting:
            if request.started:
                observers.on_request_start(request.view)
        if observers.wants("on_step"):
            observers.on_step(stats)
        if observers.wants("on_request_finished"):
            for each in committed:
                if each.request.finish_reason is not None:
                    observers.on_request_finished(each.request.view, each.request.metrics.as_dict())

    def abort(self, request_id: str) -> Request | None:
        """End a request where it stands. Returns it, or None if it is not running or waiting."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.abort()
            self.parts.runner.finish(request)
            if request.started:
                self.parts.observers.on_request_finished(request.view, request.metrics.as_dict())
        return request

    def get_metrics(self) -> list[Metric]:
        """All counters since the engine started."""
        self.metrics.counts["one_hot_fallback_rows"] = self.parts.drafts.num_one_hot_fallbacks
        return self.metrics.collect()

    def export_metrics(self, exporter: str = PROMETHEUS) -> str:
        """All counters as text: "prometheus", or an exporter that a hook plugin registers.

        Raises ConfigError SD-E132 if nobody offers it, PluginLoadError SD-E118 if a plugin's exporter fails.
        """
        return export(exporter, self.get_metrics(), self.parts.hooks)

    def save_proposer_state(self, path: Path) -> None:
        """Have the proposer write its shared state, if it has any."""
        if self.parts.guest:
            self.parts.guest.save(path)

    def load_proposer_state(self, path: Path) -> None:
        """Have the proposer read what it wrote."""
        if self.parts.guest:
            self.parts.guest.load(path)

    def check_integrity(self) -> None:
        """Raise IntegrityError if blocks or rows are lost or owned twice. For tests; cheap between steps."""
        self.parts.scheduler.check_integrity()

    def close(self) -> None:
        """Abort what runs and close the proposer. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as every:  # each one, also where the proposer raises; the last one first
            every.callback(lambda: self.parts.observers.on_engine_stop(self.metrics.acceptance.as_dict()))
            if self.parts.guest:
                every.callback(self.parts.guest.close)
            for request_id in self._requests:
                every.callback(self.abort, request_id)

    def _read_prompt(self, prompt: Prompt, request_id: str) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                raise RequestError(
                    "SD-E152",
                    f"request {request_id!r}: a prompt mapping has one key, 'prompt' or 'prompt_token_ids'",
                    {"found": ", ".join(map(repr, prompt))},
                )
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            return prompt, self.encode(prompt)
        if isinstance(prompt, Sequence) and all(type(token_id) is int for token_id in prompt):
            return None, [int(token_id) for token_id in prompt]
        raise RequestError(
            "SD-E152",
            f"request {request_id!r}: a prompt is a text or a list of token ids",
            {"found": f"{type(prompt).__name__}: {prompt!r:.80}"},
        )

    def _check_request(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> None:
        who, limit, vocab = f"request {request_id!r}", self.parts.info.max_model_len, self.parts.info.vocab_size
        if not token_ids:
            raise RequestError("SD-E154", f"{who} has an empty prompt", {"fix": "pass at least one token"})
        if len(token_ids) >= limit:
            raise RequestError(
                "SD-E155",
                f"{who} has a prompt that leaves no room for output",
                {"prompt": f"{len(token_ids)} tokens", "max_model_len": limit},
            )
        biased = list(params.logit_bias or ())
        named = {"prompt": token_ids, "logit_bias": biased, "stop_token_ids": params.stop_token_ids}
        for where, ids in named.items():
            outside = [token_id for token_id in ids if not 0 <= token_id < vocab]
            if outside:
                facts = {"found": outside[0], "expected": f"0 .. {vocab - 1}"}
                raise RequestError("SD-E156", f"{who}: a token id in {where} is outside the vocabulary", facts)
        if params.stop and (self.tokenizer is None or not params.detokenize):
            facts = {"fix": "use stop_token_ids, or a model with a tokenizer and detokenize=True"}
            raise RequestError("SD-E157", f"{who} has stop texts, but its output is not decoded to text", facts)
        needed = min(len(token_ids) + params.max_tokens, limit)
        capacity = self.parts.kv_capacity
        if needed > capacity:
            raise RequestError(
                "SD-E158",
                f"{who} can never fit the KV cache",
                {"needs": f"{needed} tokens", "capacity": capacity, "fix": "fewer max_tokens, or more num_kv_blocks"},
            )


def finish_reason_of(request: Request) -> str | None:
    """The reason's public word; None while the request runs."""
    reason: FinishReason | None = request.finish_reason
    return None if reason is None else reason.value
