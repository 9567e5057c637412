"""The decoding method: the engine's own step over a transformers model, one request at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from specdec import SamplingParams
from specdec.core.host import (
    BlockPool,
    Committed,
    DraftStore,
    EngineConfig,
    EngineMetrics,
    KVCache,
    Request,
    Runner,
    Scheduler,
    Speculation,
    SpeculativeSettings,
    ViewBuilder,
    profile_of,
    refuse_unsupported,
    registry,
    target_info,
)
from specdec.sdk.errors import ConfigError, Refusal
from specdec.sdk.types import SamplingView, TargetInfo

from ..verification import refuse_adaptive
from .call import Call
from .target import GenerateTarget

_BLOCK_SIZE = 16
_PLAIN = SamplingParams(temperature=1.0)  # of logits that the call's own processors have made into the distribution
_GREEDY = SamplingParams(temperature=0.0)


def speculative(
    model: Any,
    speculative_config: SpeculativeSettings,
    *,
    tokenizer: Any = None,
    max_model_len: int | None = None,
    plugin_settings: registry.PluginSettings | None = None,
    listeners: Sequence[object] = (),
) -> SpeculativeDecoding:
    """What `model.generate(..., custom_generate=...)` takes to decode with a proposer's drafts.

    model: a transformers causal language model, loaded and on its device; it is left as it is. speculative_config: as
    `LLM` takes it. tokenizer: the model's, for proposers that compare vocabularies. max_model_len: the most tokens of
    prompt and output; draft KV and token history are sized for it; None: the model's own limit. listeners: objects with
    hooks, called like those of installed plugins.

    Raises ConfigError, PluginLoadError or UnsupportedModelError for what cannot run, before any draft weight is loaded
    where that can be known. Keep the result: making it loads the proposer, using it does not.
    """
    text_config = model.config.get_text_config(decoder=True)
    refuse_unsupported(text_config.to_dict(), with_states=True)
    plugins = plugin_settings or registry.PluginSettings.from_environment(os.environ)
    name, device = model.name_or_path or "a model object", model.device
    config = EngineConfig(
        model=name, device=str(device), max_model_len=max_model_len, max_num_seqs=1, block_size=_BLOCK_SIZE
    )
    info = target_info(config, name, text_config, model.dtype, device)
    hooks = registry.load_hooks(plugins)
    for listener in listeners:
        hooks.add(listener, type(listener).__name__)
    speculation = Speculation.prepare(speculative_config, info, plugins, hooks)
    if speculation is None:
        raise ConfigError("SD-E133", "speculative_config names no proposer", {"found": "None"})
    _refuse_needs(speculation)
    refuse_adaptive(speculation.config, "transformers")
    return SpeculativeDecoding(model, info, speculation, hooks.observers, tokenizer)


def _refuse_needs(speculation: Speculation) -> None:
    """Raise Refusal for needs that a call of `generate` cannot meet."""
    needs = speculation.loaded.needs
    used = {"target_kv": needs.target_kv, "target_layers": needs.target_layers}
    names = [name for name, need in used.items() if need]
    if names:
        reason = f"a call of `generate` brings its own cache, and it works on the target's ({', '.join(names)})"
        refusal = Refusal(reason, f"specdec.LLM, or a proposer without {' and '.join(names)}")
        raise refusal.attributed_on(speculation.loaded.plugin)


class SpeculativeDecoding:
    """A decoding method for one model. Greedy output is that of plain `generate`; sampled output has its distribution.

    One prompt a call, one call at a time. Logits processors and stopping criteria are the call's own; a processor must
    be a function of the tokens and scores that it is given. A streamer is passed as `token_streamer=`, because
    `generate` does not hand `streamer=` to a decoding method of one's own.
    """

    def __init__(
        self, model: Any, info: TargetInfo, speculation: Speculation, observers: registry.Observers, tokenizer: Any
    ) -> None:
        needs, k = speculation.loaded.needs, speculation.loaded.config.num_draft_tokens
        self.metrics = EngineMetrics(info.model, speculation.loaded.plugin.label)
        self._longest, self._num_draft_tokens, self._hidden_states = info.max_model_len, k, needs.hidden_states
        self._loaded = speculation.loaded
        profile = profile_of(model.device)
        self._target = GenerateTarget(model, k, profile.backend)
        self._views = _Views(needs, k, info, model.device)
        num_blocks = -(-(info.max_model_len + speculation.lookahead) // _BLOCK_SIZE)
        whole_prompt = info.max_model_len + k
        self._scheduler = Scheduler(BlockPool(num_blocks, _BLOCK_SIZE), 1, whole_prompt, speculation.lookahead)
        addressing = profile.addressing(self._scheduler, info, speculation.lookahead)
        services = speculation.services(info, self._target, tokenizer, profile.backend)
        self._host = speculation.host(info, services, self.metrics, observers, model.device, self._views)
        services.lay_out_draft_kv(num_blocks, addressing)
        self._host.warm_up()
        num_blocks += addressing.num_pad_blocks
        no_layers = KVCache([], num_blocks, _BLOCK_SIZE, model.dtype, model.device, self._target.states)
        self._runner = Runner(
            self._target,
            no_layers,  # a call brings its own keys and values
            self._scheduler,
            DraftStore(speculation.distribution_buffers(info, model.device)),
            self.metrics,
            self._host,
            profile=False,
            addressing=addressing,
            rule=speculation.rule,
        )
        self._runner.on_verified = observers.on_verified
        self._numbers = count()

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
        """Called by `generate`. Returns what it returns: ids [1, T], or its output object where that was asked for.

        Raises RequestError SD-E197 for what is not offered, ConfigError SD-E198 for another model, and ProposerError
        if the proposer fails under `on_proposer_error="raise"`.
        """
        if model is not self._target.model:
            raise ConfigError("SD-E198", "this decoding was made for another model", {"fix": "speculative(model, ...)"})
        call = Call.read(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            self._target.new_cache(),
            self._num_draft_tokens,
            self._longest,
        )
        streamer = token_streamer or _Nobody()
        streamer.put(input_ids.cpu())
        try:
            with self._target.serving(call, self._hidden_states):
                length = self._generate(call, streamer)
                self._target.end(length - 1)
        finally:
            streamer.end()
        return call.output(length)

    @property
    def proposer(self) -> Any:
        """The object that drafts."""
        return self._host.proposer

    def close(self) -> None:
        """Close the proposer."""
        self._host.close()

    def _generate(self, call: Call, streamer: Any) -> int:
        """Step until the call ends. Returns the length of its text."""
        request = self._request(call)
        self._views.shown = call.sampling
        self._scheduler.add(request)
        try:
            while True:
                start = len(request.token_ids)
                self._runner.step([])
                token_ids = request.token_ids[start:]
                call.write(start, token_ids)
                call.keep_scores(self._target.last_scores, self._target.last_logits, len(token_ids))
                num_standing = call.stops_within(start, token_ids)
                streamer.put(torch.tensor(token_ids[:num_standing]))
                if num_standing is not None:
                    return start + num_standing
        finally:
            if request.finish_reason is None:
                request.abort()
                self._runner.finish([request])

    def _request(self, call: Call) -> Request:
        sampled = call.settings.do_sample
        return Request(
            request_id=str(next(self._numbers)),
            prompt_token_ids=call.prompt,
            params=_PLAIN if sampled else _GREEDY,
            seed=int(torch.randint(2**63 - 1, ())) if sampled else 0,  # so that torch.manual_seed decides
            max_total_tokens=call.max_tokens,
            end_token_ids=call.end_token_ids,
            detokenizer=None,
            options=self._loaded.read_request(None, "of generate"),
        )


class _Views(ViewBuilder):
    """Shows a proposer the call's sampling parameters; the engine's own are those of processed logits."""

    shown: SamplingView

    def _sampling(self, committed: Sequence[Committed], sent: Mapping[str, Tensor]) -> SamplingView:
        declared = {name: getattr(self.shown, name).to(self.device) for name in self.needs.sampling}
        return SamplingView(**declared, all_greedy=self.shown.all_greedy)


class _Nobody:
    """A streamer that nobody reads."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...
