"""The engine: takes requests, steps them all together, gives back what happened."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from torch import Tensor

from specdec.sdk.errors import ConfigError, RequestError
from specdec.sdk.saved_state import as_path

from ..config.engine_config import EngineConfig
from ..config.sampling_params import SamplingParams
from ..proposing.proposer_host import ProposerHost
from ..proposing.speculation import SpeculativeSettings
from ..registry import PluginSettings
from ..request.chat import Message, encode_chat
from ..request.metrics import Metric
from ..request.prompts import Prompt, encode, read_prompt
from ..request.request import Committed, Detokenizer, Request
from ..runner.request_progress import uninterrupted
from .assembly import Parts, assemble
from .turn import Turn


class Engine:
    """Continuous batching over one target and at most one proposer.

    One thread at a time: a call while another thread is inside raises RequestError SD-E177, but `abort` is taken from
    anybody. Hooks and proposers may call `add_request` and `abort`; a step within a step is refused as well.
    """

    def __init__(
        self,
        config: EngineConfig,
        speculative_config: SpeculativeSettings = None,
        plugin_settings: PluginSettings | None = None,
        assemble: Callable[[EngineConfig, SpeculativeSettings, PluginSettings], Parts] = assemble,
    ) -> None:
        """Put an engine together. Without a `speculative_config` it decodes plainly, whatever the model.

        `plugin_settings`: which plugins may load; None: as the environment says (SPECDEC_PLUGINS, ...).
        `assemble`: what builds its parts.
        """
        settings = plugin_settings or PluginSettings.from_environment(os.environ)
        self.parts: Parts = assemble(config, speculative_config, settings)
        self.config = config
        self.tokenizer = self.parts.model.tokenizer
        self.metrics = self.parts.metrics
        self.text_equality = self.parts.model.text_equality
        self.prefix_caching = self.parts.plan.prefix_caching
        self.listeners: dict[str, Callable[[Committed], None]] = {}  # by request: called when it goes on or ends
        self.turn = Turn(self._between_steps)  # several calls as one: `turn.taken`
        self._aborts: deque[Request] = deque()  # asked for, not yet carried out
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._closed = False
        self._observers = self.parts.plan.hooks.observers
        self._observers.on_engine_start(engine=self)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue text, token ids, {"prompt": ...}, {"prompt_token_ids": ...} or {"messages": ...}. Returns the id.

        A request has one output: `LLM` makes n requests of one with n > 1. Raises RequestError, naming the request, if
        it can never be served; nothing is queued then.
        """
        with self.turn.taken("add_request"):
            if self._closed:
                raise RequestError("SD-E169", "the engine is closed and takes no requests", {"fix": "make a new one"})
            if request_id is None:
                request_id = next(name for name in map(str, count(self._num_added)) if name not in self._requests)
            if not isinstance(request_id, str) or request_id in self._requests:
                why = "in use" if isinstance(request_id, str) else "no text"
                raise RequestError("SD-E151", f"request id {request_id!r} is {why}", {"fix": "another text, or None"})
            request = self._new_request(prompt, params or SamplingParams(), request_id)
            with uninterrupted():
                self._num_added += 1
                self._requests[request_id] = request
                self.parts.cache.scheduler.add(request)
        return request_id

    def _new_request(self, prompt: Prompt, params: SamplingParams, request_id: str) -> Request:
        if isinstance(prompt, Mapping) and prompt.keys() == {"messages"}:
            prompt = self.encode_chat(prompt["messages"])
        text, token_ids = read_prompt(prompt, request_id, self.encode)
        self._check_request(token_ids, params, request_id)
        host = self.parts.host
        options = host.loaded.read_request(params.extra_args, request_id) if host else None
        seed = params.seed
        if seed is None:
            seed = random.Random(f"{self.config.seed}:{self._num_added}").getrandbits(63)
        stop_ids = frozenset(params.stop_token_ids)
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            max_total_tokens=min(len(token_ids) + params.max_tokens, self.parts.plan.info.max_model_len),
            end_token_ids=stop_ids if params.ignore_eos else stop_ids | self.parts.model.eos_token_ids,
            detokenizer=self._detokenizer(params),
            prompt=text,
            grammar=self.parts.grammars.start(params.structured_outputs, request_id),
            options=options,
        )

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        include_stop = params.include_stop_str_in_output
        return Detokenizer(self.tokenizer, params.stop, params.skip_special_tokens, include_stop=include_stop)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises RequestError: SD-E153 without a tokenizer, SD-E212 for what is no text."""
        return encode(self.tokenizer, text)

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the model's template. Raises RequestError: see `render_chat`, and SD-E212."""
        return encode_chat(self.tokenizer, messages, add_generation_prompt=add_generation_prompt)

    def get_request(self, request_id: str) -> Request:
        """A queued or running request. Raises KeyError if there is none of this id."""
        return self._requests[request_id]

    def step(self) -> list[Committed]:
        """Advance all requests by one step. Returns what was committed to each; finished requests are gone then.

        Where a proposer's error is raised, it is raised last: what the step committed stands in its requests, and
        its listener and the hooks know of it.
        """
        if not self._requests:
            return []
        with self.turn.taken("step", alone=True):
            starting: list[Request] = []
            if self._observers.on_request_start.get_hookimpls():
                starting = [request for request in self._requests.values() if not request.started]
            committed: list[Committed] = []
            try:
                with self.parts.working():
                    self.parts.runner.step(committed)
            except BaseException:
                self._settle_interrupted(committed)
                raise
            finally:
                self._tell(starting, committed)
        return committed

    def _settle_interrupted(self, committed: list[Committed]) -> None:
        """An interrupt may have come between a request's end and its place in the list, or its release."""
        ended = [request for request in self._requests.values() if request.finish_reason is not None]
        listed = {each.request.request_id for each in committed}
        committed += [Committed.nothing(request) for request in ended if request.request_id not in listed]
        with self.parts.working():
            self.parts.runner.finish(ended)

    def _tell(self, starting: Sequence[Request], committed: Sequence[Committed]) -> None:
        """Let go of what ended, then tell everybody of the step: hooks find the engine as the next step will."""
        ended = [each.request for each in committed if each.request.finish_reason is not None]
        if ended or self.listeners:
            with uninterrupted():
                for request in ended:
                    del self._requests[request.request_id]
                self._notify(committed)
        for request in starting:
            if request.started:
                self._observers.on_request_start(request=request.view)
        stats = self.parts.runner.last_stats
        if committed and stats:
            self._observers.on_step(stats=stats)
        if ended:
            self._tell_finished(ended)

    def _notify(self, committed: Sequence[Committed]) -> None:
        for each in committed:
            name, has_ended = each.request.request_id, each.request.finish_reason is not None
            if listener := self.listeners.pop(name, None) if has_ended else self.listeners.get(name):
                listener(each)

    def _tell_finished(self, ended: Sequence[Request]) -> None:
        hook = self._observers.on_request_finished
        for request in ended if hook.get_hookimpls() else ():
            if request.started:
                hook(request=request.view, metrics=request.metrics.as_dict())

    def abort(self, request_id: str) -> Request | None:
        """End a request where it stands. Returns it, or None if it is not running or waiting.

        Any thread, hook or proposer may call this. While a step runs, the request ends when the step is complete,
        unless the step itself ends it.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._aborts.append(request)
            self._between_steps()
        return request

    def _between_steps(self) -> None:
        """Do what other threads asked for. If a thread is inside the engine, that one does it on leaving."""
        host = self.parts.host
        while self._aborts or (host and host.metrics_wanted):
            with self.turn.alone_if_free() as free:
                if not free:
                    return
                if self._aborts:
                    self._end([self._aborts.popleft() for _ in range(len(self._aborts))])
                if host:
                    host.ask_metrics()

    def _end(self, requests: Sequence[Request]) -> None:
        ended: list[Request] = []
        for request in requests:
            if self._requests.get(request.request_id) is request:  # not one that has its id by now
                del self._requests[request.request_id]
                request.abort()
                ended.append(request)
        try:
            with self.parts.working():
                self.parts.runner.finish(ended)
        finally:
            self._notify([Committed.nothing(request) for request in ended])
            self._tell_finished(ended)

    def get_metrics(self) -> list[Metric]:
        """All counters since the engine started. Within a step, the proposer's own figures are those it told last."""
        self.metrics.counts["one_hot_fallback_rows"] = self.parts.drafts.num_one_hot_fallbacks
        host = self.parts.host
        if host and not self._closed:
            host.metrics_wanted = True
            self._between_steps()
        return self.metrics.collect(of_proposer=host.own_metrics if host else None)

    def save_proposer_state(self, path: str | Path) -> None:
        """Do what `LLM.save_proposer_state` says."""
        with self.turn.taken("save_proposer_state", alone=True), self.parts.working():
            self._stateful().save(as_path(path))

    def load_proposer_state(self, path: str | Path) -> None:
        """Do what `LLM.load_proposer_state` says."""
        with self.turn.taken("load_proposer_state", alone=True), self.parts.working():
            self._stateful().load(as_path(path))

    def update_proposer_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Do what `LLM.update_proposer_weights` says."""
        with self.turn.taken("update_proposer_weights", alone=True), self.parts.working():
            self._host("SD-E227", "there is no proposer that could take weights").update_weights(tensors)
            self.parts.drafts.clear()
            self.parts.cache.scheduler.forget_blocks()  # draft KV of the old weights outlives its requests there

    def reset_prefix_cache(self) -> None:
        """Do what `LLM.reset_prefix_cache` says."""
        with self.turn.taken("reset_prefix_cache", alone=True):
            self.parts.cache.scheduler.forget_blocks()

    def _stateful(self) -> ProposerHost:
        return self._host("SD-E179", "there is no proposer whose state could be kept")

    def _host(self, code: str, summary: str) -> ProposerHost:
        if self._closed:
            raise RequestError("SD-E169", "the engine is closed, and so is its proposer", {"fix": "make a new one"})
        if self.parts.host is None:
            raise ConfigError(code, summary, {"found": "no speculative_config", "fix": "give one"})
        return self.parts.host

    def check_integrity(self) -> None:
        """Raise IntegrityError if blocks or rows are lost or owned twice. For tests; cheap between steps."""
        self.parts.cache.scheduler.check_integrity()

    def close(self) -> None:
        """Abort what runs and close the proposer. Safe to call twice."""
        if self._closed:
            return
        with self.turn.taken("close", alone=True), self.parts.working(), ExitStack() as every:  # each; the last first
            self._closed = True
            every.callback(lambda: self._observers.on_engine_stop(summary=self.metrics.acceptance.as_dict()))
            if self.parts.host:
                every.callback(self.parts.host.close)
            every.callback(self._end, list(self._requests.values()))

    def _check_request(self, token_ids: Sequence[int], params: SamplingParams, request_id: str) -> None:
        who, info = f"request {request_id!r}", self.parts.plan.info
        limit, vocab = info.max_model_len, info.vocab_size
        if params.n != 1:
            fix = "LLM.generate, which makes n requests; or n=1"
            facts: dict[str, object] = {"found": f"n={params.n}", "fix": fix}
            raise RequestError("SD-E345", f"{who} asks for several outputs; a request of an engine has one", facts)
        if not token_ids:
            raise RequestError("SD-E154", f"{who} has an empty prompt", {"fix": "pass at least one token"})
        if len(token_ids) >= limit:
            room = {"prompt": f"{len(token_ids)} tokens", "max_model_len": limit}
            raise RequestError("SD-E155", f"{who} has a prompt that leaves no room for output", room)
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
            fix = "fewer max_tokens, or more num_kv_blocks"
            facts = {"needs": f"{needed} tokens", "capacity": capacity, "fix": fix}
            raise RequestError("SD-E158", f"{who} can never fit the KV cache", facts)


def finish_reason_of(request: Request) -> str | None:
    """The reason's public word; None while the request runs."""
    return None if request.finish_reason is None else request.finish_reason.value
