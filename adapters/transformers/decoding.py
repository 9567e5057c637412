"""The decoding method: the engine's own step over a transformers model, a call's batch at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin

from specdec import SamplingParams
from specdec.core.host import (
    BlockPool,
    Committed,
    DraftStore,
    EngineConfig,
    EngineMetrics,
    EngineServices,
    KVCache,
    Request,
    Runner,
    Schedule,
    Scheduler,
    Speculation,
    SpeculativeSettings,
    profile_of,
    refuse_unsupported,
    registry,
    target_info,
)
from specdec.sdk.errors import ConfigError, RequestError, UnsupportedModelError
from specdec.sdk.extensions import DraftKV
from specdec.sdk.types import SamplingView, TargetInfo

from ..best_path import PathHost, PathViews
from ..withheld import withheld
from .call import Call
from .compiled import as_generated
from .refusals import refuse_spread_weights, refused
from .target import GenerateTarget
from .text import Text

_BLOCK_SIZE = 16
_PLAIN = SamplingParams(temperature=1.0)  # of logits that the call's own processors have made into the distribution
_GREEDY = SamplingParams(temperature=0.0)


def speculative(
    model: Any,
    speculative_config: SpeculativeSettings,
    *,
    tokenizer: Any = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 1,
    plugin_settings: registry.PluginSettings | None = None,
    listeners: Sequence[object] = (),
) -> SpeculativeDecoding:
    """What `model.generate(..., custom_generate=...)` takes to decode with a proposer's drafts.

    model: a transformers causal language model, loaded and on its device; it is left as it is. speculative_config: as
    `LLM` takes it. tokenizer: the model's, for proposers that compare vocabularies. max_model_len: the most tokens of
    prompt and output of a row; None: the model's own limit. max_num_seqs: the most rows of a call. Draft KV and token
    history are sized for both. listeners: objects with hooks, called like those of installed plugins.

    Raises ConfigError, PluginLoadError or UnsupportedModelError for what cannot run, before any draft weight is loaded
    where that can be known. Keep the result: making it loads the proposer, using it does not.
    """
    model = as_generated(model)
    if not isinstance(model, GenerationMixin):
        facts = {"class": type(model).__name__, "reason": "it is no model with transformers' own `generate`"}
        raise UnsupportedModelError("SD-E142", "this model cannot be served as a target", facts)
    text_config = model.config.get_text_config(decoder=True)
    refuse_unsupported(text_config, with_states=True)
    plugins = plugin_settings or registry.PluginSettings.from_environment(os.environ)
    name, device = model.name_or_path or "a model object", model.device
    config = EngineConfig(
        model=name,
        device=str(device),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=_BLOCK_SIZE,
    )
    info = target_info(config, name, text_config, model.dtype, device)
    hooks = registry.load_hooks(plugins)
    for listener in listeners:
        hooks.add(listener, type(listener).__name__)
    missing = withheld("`generate`", "a call of `generate` brings its own cache", device)
    speculation = Speculation.prepare(speculative_config, info, plugins, hooks, withheld=missing)
    if speculation is None:
        raise ConfigError("SD-E133", "speculative_config names no proposer", {"found": "None"})
    return SpeculativeDecoding(model, info, speculation, hooks.observers, tokenizer)


class SpeculativeDecoding:
    """A decoding method for one model. Greedy output is that of plain `generate`; sampled output has its distribution.

    One call at a time; several threads need a decoding each. Logits processors and stopping criteria are the call's
    own, and are asked row by row. A processor must be a function of the tokens and scores that it is given. A streamer
    is passed as `token_streamer=`, because `generate` does not hand `streamer=` to a decoding method of one's own.
    """

    def __init__(
        self, model: Any, info: TargetInfo, speculation: Speculation, observers: registry.Observers, tokenizer: Any
    ) -> None:
        needs, k = speculation.loaded.needs, speculation.loaded.config.width
        self.metrics = EngineMetrics(info.model, speculation.loaded.plugin.label)
        self._info, self._loaded = info, speculation.loaded
        profile = profile_of(model.device)
        self._target = GenerateTarget(
            model,
            k,
            profile.backend,
            may_begin_late=needs.extension(DraftKV) is None and not needs.whole_prompt,
            reads_states=bool(needs.hidden_states),
        )
        self._views = _Views(needs, k, info, model.device)
        num_blocks = info.max_num_seqs * -(-(info.max_model_len + speculation.lookahead) // _BLOCK_SIZE)
        whole_prompts = info.max_num_seqs * (info.max_model_len + k)
        pool = BlockPool(num_blocks, _BLOCK_SIZE)
        self._scheduler = _Planning(pool, info.max_num_seqs, whole_prompts, speculation.lookahead)
        self._scheduler.target = self._target
        addressing = profile.addressing(self._scheduler, info, speculation.lookahead)
        services = EngineServices(info, needs, self._target, tokenizer, profile.backend)
        self._host = speculation.host(services, self.metrics, observers, model.device, self._views, kind=PathHost)
        services.lay_out_draft_kv(num_blocks, addressing)
        self._host.warm_up()
        num_blocks += addressing.num_pad_blocks
        no_layers = KVCache([], num_blocks, _BLOCK_SIZE, model.dtype, model.device, self._target.states)
        self._runner = Runner(
            self._target,
            no_layers,  # a call brings its own keys and values
            self._scheduler,
            DraftStore(speculation.distribution_buffers(model.device)),
            self.metrics,
            self._host,
            addressing=addressing,
            rule=speculation.rule,
            on_verified=observers.on_verified,
        )
        self._numbers = count()
        self._turn = Lock()
        self._closed = False

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        token_streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by `generate`. Returns what it returns: ids [B, T], or its output object where that was asked for.

        Raises RequestError SD-E197 for what is not offered, and SD-E169 once it is closed; ConfigError SD-E198 for
        another model or one that was compiled since; ProposerError if the proposer fails under
        `on_proposer_error="raise"`.
        """
        if model is not self._target.model:
            raise ConfigError("SD-E198", "this decoding was made for another model", {"fix": "speculative(model, ...)"})
        refuse_spread_weights(model)
        with self._one_call():
            call = Call.read(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                model_kwargs,
                self._loaded.config.width,
                self._info,
            )
            cache = self._target.open_cache(call)
            streamer = token_streamer or _Nobody()
            streamer.put(input_ids.cpu())
            try:
                with self._target.serving(call, cache, self._loaded.needs.hidden_states):
                    self._generate(call, streamer)
                    self._target.end()
            finally:
                streamer.end()
            return call.output(cache)

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """No other call runs meanwhile. Raises RequestError SD-E197 where one does, SD-E169 once it is closed."""
        if not self._turn.acquire(blocking=False):
            raise refused("a call while another one runs with the same decoding", "a speculative(...) for each thread")
        try:
            if self._closed:
                raise RequestError(
                    "SD-E169", "this decoding is closed, and so is its proposer", {"fix": "make a new one"}
                )
            yield
        finally:
            self._turn.release()

    @property
    def proposer(self) -> Any:
        """The object that drafts."""
        return self._host.proposer

    def proposer_figures(self) -> dict[str, float]:
        """The proposer's own figures between two calls, where it has any (`Metrics`): `proposer_NAME_` and its name.

        While a call runs, and once it is closed, they are the last ones that it told.
        """
        if self._turn.acquire(blocking=False):
            try:
                self._host.metrics_wanted = not self._closed
                self._host.ask_metrics()
            finally:
                self._turn.release()
        return self._host.own_metrics

    def close(self) -> None:
        """Close the proposer when no call runs. Safe to call twice."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self._host.close()

    def _generate(self, call: Call, streamer: Any) -> None:
        """Step until every text has ended."""
        self._views.call = call
        for text in call.texts:
            text.request = self._request(call, text)
            self._scheduler.add(text.request)
        num_shown = 0
        try:
            while not all(text.ended for text in call.texts):
                self._step(call)
                for index in range(num_shown, call.num_output_tokens):
                    streamer.put(call.column(index))
                num_shown = call.num_output_tokens
        finally:
            del self._views.call  # whose scores and cache nobody needs from here on
            self._leave([text.request for text in call.texts])

    def _step(self, call: Call) -> None:
        """Take one step of all texts that have not ended."""
        running = [(text, len(text.request.token_ids)) for text in call.texts if not text.ended]
        self._runner.step([])
        for text, start in running:
            call.commit(text, text.request.token_ids[start:])
        self._leave([text.request for text, _ in running if text.ended])

    def _leave(self, requests: Sequence[Request]) -> None:
        """Release those that end before the engine ended them."""
        leaving = [request for request in requests if request.finish_reason is None]
        for request in leaving:
            request.abort()
        if leaving:
            self._runner.finish(leaving)

    def _request(self, call: Call, text: Text) -> Request:
        sampled = call.settings.do_sample
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=text.prompt,
            params=_PLAIN if sampled else _GREEDY,
            seed=int(torch.randint(2**63 - 1, ())) if sampled else 0,  # so that torch.manual_seed decides
            max_total_tokens=text.max_tokens,
            end_token_ids=call.end_token_ids,
            detokenizer=None,
            options=self._loaded.read_request(None, "of generate"),
            num_computed_tokens=text.num_held,
        )


class _Planning(Scheduler):
    """Tells the target what the next pass computes."""

    target: GenerateTarget

    def schedule(self, num_drafts: Callable[[Request], int]) -> Schedule:
        """Plan the next pass, and hand the plan to the target."""
        schedule = super().schedule(num_drafts)
        self.target.plan = schedule.shares
        return schedule


class _Views(PathViews):
    """Shows a proposer the call's sampling parameters; the engine's own are those of processed logits."""

    call: Call

    def _sampling(self, committed: Sequence[Committed], sent: Mapping[str, Tensor]) -> SamplingView:
        return self.call.sampling(self.needs.sampling, len(committed), self.device)


class _Nobody:
    """A streamer that nobody reads."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...
