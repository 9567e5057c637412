"""`LLM`: the engine for people, with the names that vLLM users know."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from torch import Tensor

from specdec.sdk.errors import ProposerError

from .config.engine_config import EngineConfig
from .config.sampling_params import SamplingParams, params_of_each
from .engine.engine import Engine, finish_reason_of
from .engine.outputs import CompletionOutput, RequestOutput, StreamUpdate
from .engine.verifier_checkpoint import with_verifier
from .model.tokenizer import default_params
from .proposing.speculation import SpeculativeSettings
from .registry import PluginSettings
from .registry.functions import call_offered
from .request.chat import Message
from .request.metrics import Metric
from .request.prompts import Prompt, as_prompts
from .request.request import Committed, Request

Params = SamplingParams | Sequence[SamplingParams] | None
PROMETHEUS = "prometheus"
"""Metrics are exported in this format unless another is named; see adapters/prometheus.py."""


class LLM:
    """Offline generation with or without a proposer.

        llm = LLM("tiny", speculative_config={"method": "...", "num_speculative_tokens": 4})
        llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text

    `model` may be a drafter's checkpoint that names its target: it drafts for that one.
    `speculative_config` is vLLM's: a dict, a JSON string or a SpeculativeConfig. `settings` are the fields of
    EngineConfig. Raises ConfigError, PluginLoadError or UnsupportedModelError before any weight is loaded where that
    can be known.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        speculative_config: SpeculativeSettings = None,
        plugin_settings: PluginSettings | None = None,
        **settings: Any,
    ) -> None:
        config = EngineConfig(model=model, **settings)  # first: what is no setting is refused before a file is read
        target, speculative_config = with_verifier(config.model, speculative_config)
        self.engine = Engine(config.replace(model=target), speculative_config, plugin_settings)
        self._prompts: WeakValueDictionary[str, _Prompt] = WeakValueDictionary()  # that somebody waits for
        stored = self.engine.parts.model.target.model.generation_config
        with ExitStack() as started:
            started.callback(self.engine.close)
            self._defaults = default_params(config.generation_config, stored)
            started.pop_all()

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """Generate an output for each prompt, in order. A list of ints is one prompt; a list of anything else is
        several.

        sampling_params: for all prompts, or one for each. None means `get_default_sampling_params`.

        Raises RequestError before anything runs if one of the prompts can never be served.
        """
        with self.engine.turn.taken("generate"):
            submitted = self._submit(prompts, sampling_params)
            try:
                while any(prompt.running for prompt in submitted):
                    self.engine.step()
            except BaseException as error:
                self._give_up(submitted, error)
                raise
            return [prompt.output() for prompt in submitted]

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[StreamUpdate]:
        """What each step commits to each prompt, as it happens. Closing the iterator aborts what still runs.

        The last update of every output has a finish_reason, "abort" after `abort`, `close` or an error, which is raised
        when all is shown.

        Updates of prompt i carry request id of the i-th prompt in `prompts`; with n > 1, `index` tells outputs apart.
        Requests of other callers advance with these, and their tokens wait for these callers.
        """
        submitted = self._submit(prompts, sampling_params)
        updates: deque[StreamUpdate] = deque()
        readers = {
            request.request_id: _Reader(prompt.request_id, index, updates).show
            for prompt in submitted
            for index, request in enumerate(prompt.requests)
        }
        self.engine.listeners |= readers
        try:
            while updates or any(prompt.running for prompt in submitted):
                if updates:
                    yield updates.popleft()
                    continue
                try:
                    self.engine.step()
                except Exception as error:
                    self._give_up(submitted, error)
                    yield from updates
                    raise
        finally:
            for request_id in readers:
                self.engine.listeners.pop(request_id, None)
            self._abort(submitted)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Continue one conversation or several, through the chat template of the model's tokenizer or processor.

        A message's content is a text, or a list of parts `{"type": "text", "text": ...}`. Raises RequestError SD-E159
        without a template, SD-E211 for messages that it does not render, SD-E265 for images, sound and video.
        """
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping)
        conversations = list(messages) if several else [messages]
        prompts = [
            self.engine.encode_chat(conversation, add_generation_prompt=add_generation_prompt)  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self.generate([{"prompt_token_ids": ids} for ids in prompts], sampling_params)

    def abort(self, request_id: str) -> None:
        """End a running request, and with n > 1 all outputs of its prompt, whose id is that of the first one.

        A stream keeps its output so far. Any thread or hook may call this.
        """
        prompt = self._prompts.get(request_id)
        if prompt is None:
            self.engine.abort(request_id)
        else:
            self._abort([prompt])

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests without SamplingParams. `generation_config` says whose defaults they are."""
        return self._defaults

    def get_tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.engine.tokenizer

    def add_hooks(self, plugin: object) -> None:
        """Call the hooks of an object of this process, as those of installed plugins are called.

        plugin: an object whose methods carry `specdec.sdk.hookimpl`. Raises PluginLoadError SD-E117 if none does, or if
        one of its class is there already.
        """
        self.engine.parts.plan.hooks.add(plugin, type(plugin).__name__)

    def get_metrics(self) -> list[Metric]:
        """All counters since the engine started."""
        return self.engine.get_metrics()

    def export_metrics(self, exporter: str = PROMETHEUS) -> str:
        """All counters as text: "prometheus" for its scraper, or what a distribution offers in the group
        `specdec.metrics_exporters`: a function of the metrics that returns a text.

        Raises ConfigError SD-E132 if nobody offers it, PluginLoadError SD-E118 if a plugin's exporter fails.
        """
        plugins = self.engine.parts.plan.plugins
        return call_offered("metrics_exporters", exporter, self.get_metrics(), str, plugins, ())

    def save_proposer_state(self, path: str | Path) -> None:
        """Have the proposer write its shared state (a corpus, statistics) below the directory `path`, in one step.

        Raises ConfigError SD-E179 for a proposer without state, SD-E181 where nothing can be written, ProposerError if
        the proposer fails; a state that was saved there before is kept then.
        """
        self.engine.save_proposer_state(path)

    def load_proposer_state(self, path: str | Path) -> None:
        """Have the proposer take up what `save_proposer_state` wrote.

        Raises ConfigError SD-E179 for a proposer without state, SD-E181 where there is none of this proposer and of a
        version that understands it, ProposerError if the proposer fails.
        """
        self.engine.load_proposer_state(path)

    def update_proposer_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the proposer new weights, by the names of its checkpoint's tensors. Tensors that are not named stay.

        It happens between two steps: requests go on, drafts that wait are dropped, and outputs keep their distribution.
        Keys and values that the drafter computed with old weights stay until their requests end, and draft a little
        worse. Nothing is changed where this raises.

        Raises ConfigError: SD-E227 for a proposer without weights, SD-E228 for tensors that do not fit, SD-E229 where
        the draft network would be made of other parts; RequestError SD-E177 within a step.
        """
        self.engine.update_proposer_weights(tensors)

    def reset_prefix_cache(self) -> None:
        """Find nothing again that is cached now, as if no request had been served. Those that run keep what they have.

        Raises RequestError SD-E177 within a step.
        """
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """End for good: abort what runs, save the proposer's state to `state_dir` if any, and close the proposer."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params) -> list[_Prompt]:
        several = as_prompts(prompts)
        params = params_of_each(self._defaults if sampling_params is None else sampling_params, len(several))
        submitted: list[_Prompt] = []
        try:
            for prompt, each in zip(several, params, strict=True):
                found = _Prompt([])
                submitted.append(found)
                for one in _of_each_output(each):
                    found.requests.append(self.engine.get_request(self.engine.add_request(prompt, one)))
                self._prompts[found.request_id] = found
        except BaseException:
            self._abort(submitted)
            raise
        return submitted

    def _give_up(self, submitted: Sequence[_Prompt], error: BaseException) -> None:
        """End prompts after an error. What the proposer raises then becomes its notes."""
        for request in [each for prompt in submitted for each in prompt.running]:
            try:
                self.engine.abort(request.request_id)
            except ProposerError as another:
                error.add_note(str(another))

    def _abort(self, submitted: Sequence[_Prompt]) -> None:
        with ExitStack() as every:  # each one, also where the proposer raises
            for request in (each for prompt in submitted for each in prompt.running):
                every.callback(self.engine.abort, request.request_id)


@dataclass
class _Prompt:
    """A prompt on its way: the requests it became, several when n > 1."""

    requests: list[Request]

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request.finish_reason is None]

    def output(self) -> RequestOutput:
        first = self.requests[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=tuple(first.prompt_token_ids),
            outputs=tuple(_completion(index, request) for index, request in enumerate(self.requests)),
            num_cached_tokens=first.num_cached_tokens,
        )


@dataclass
class _Reader:
    """Where the updates of one streamed request go, and how much of its text was shown."""

    request_id: str  # of its prompt
    index: int
    updates: deque[StreamUpdate]
    num_shown: int = 0

    def show(self, each: Committed) -> None:
        """What a step committed, with the text that is new; nothing of a step in the middle of a prompt."""
        if not each.token_ids and each.request.finish_reason is None:
            return
        text = _text(each.request)
        update = StreamUpdate(
            request_id=self.request_id,
            index=self.index,
            text=text[self.num_shown :],
            token_ids=tuple(each.token_ids),
            draft_token_ids=tuple(each.draft_token_ids),
            num_accepted=each.num_accepted,
            finish_reason=finish_reason_of(each.request),
            logprobs=tuple(each.request.logprobs[-len(each.token_ids) :]) or None if each.token_ids else None,
            draft_parents=None if each.tree is None else tuple(each.tree.shown_parents()),
        )
        self.num_shown = len(text)
        self.updates.append(update)


def _of_each_output(params: SamplingParams) -> list[SamplingParams]:
    """Give each of n outputs the parameters of a request of its own."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else _wrapped(params.seed + index) for index in range(params.n)]
    return [params.replace(n=1, seed=seed) for seed in seeds]


def _completion(index: int, request: Request) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=_text(request),
        token_ids=tuple(request.output_token_ids),
        finish_reason=finish_reason_of(request) or "abort",
        stop_reason=request.stop_reason,
        logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
        spec_decode_metrics=request.metrics.as_dict(),
    )


def _text(request: Request) -> str:
    if request.detokenizer is None:
        return ""
    return request.detokenizer.text(finished=request.finish_reason is not None)


def _wrapped(seed: int) -> int:
    """Wrap the seed to the range of int64: after the largest comes the smallest."""
    return (seed + 2**63) % 2**64 - 2**63
