"""`LLM`: the engine for people, with the names that vLLM users know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specdec.sdk import ConfigError

from .engine import Engine, Prompt, finish_reason_of
from .engine_config import EngineConfig
from .metrics import Metric
from .outputs import CompletionOutput, RequestOutput, StreamUpdate
from .registry import PluginSettings
from .request import Request
from .sampling_params import SamplingParams
from .speculation import SpeculativeSettings

Params = SamplingParams | Sequence[SamplingParams] | None
Message = Mapping[str, str]


class LLM:
    """Offline generation with or without a proposer.

        llm = LLM("tiny", speculative_config={"method": "...", "num_speculative_tokens": 4})
        llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text

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
        self.engine = Engine(EngineConfig(model=model, **settings), speculative_config, plugin_settings)

    def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> list[RequestOutput]:
        """One output per prompt, in order. A list of ints is one prompt; a list of anything else is several.

        Raises RequestError before anything runs if one of the prompts can never be served.
        """
        collected: dict[str, _Prompt] = {}
        for prompt in self._submit(prompts, sampling_params):
            collected |= dict.fromkeys(prompt.request_ids, prompt)
        try:
            while self.engine.has_unfinished_requests:
                for each in self.engine.step():
                    if each.request.finish_reason is not None:
                        collected[each.request.request_id].finished[each.request.request_id] = each.request
        except BaseException:
            self._abort(collected)
            raise
        return [prompt.output() for prompt in dict.fromkeys(collected.values())]

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[StreamUpdate]:
        """What each step commits to each prompt, as it happens. Closing the iterator aborts what still runs.

        Updates of prompt i carry request id of the i-th prompt in `prompts`; with n > 1, `index` tells outputs apart.
        """
        collected: dict[str, _Prompt] = {}
        for prompt in self._submit(prompts, sampling_params):
            collected |= dict.fromkeys(prompt.request_ids, prompt)
        shown = dict.fromkeys(collected, 0)
        try:
            while self.engine.has_unfinished_requests:
                for each in self.engine.step():
                    request = each.request
                    if request.request_id not in collected or not each.token_ids:
                        continue
                    text = _text(request)
                    new_text = text[shown[request.request_id] :]
                    shown[request.request_id] = len(text)
                    prompt = collected[request.request_id]
                    yield StreamUpdate(
                        request_id=prompt.request_ids[0],
                        index=prompt.request_ids.index(request.request_id),
                        text=new_text,
                        token_ids=tuple(each.token_ids),
                        draft_token_ids=tuple(each.item.draft_token_ids),
                        num_accepted=each.num_accepted,
                        finish_reason=finish_reason_of(request),
                    )
        finally:
            self._abort(collected)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """One conversation or several, through the tokenizer's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [
            self.engine.encode_chat(conversation, add_generation_prompt=add_generation_prompt)  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self.generate([{"prompt_token_ids": ids} for ids in prompts], sampling_params)

    def abort(self, request_id: str) -> None:
        """End a running request; its output so far is kept by whoever streams it."""
        self.engine.abort(request_id)

    def get_tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.engine.tokenizer

    def get_metrics(self) -> list[Metric]:
        """All counters since the engine started."""
        return self.engine.get_metrics()

    def close(self) -> None:
        """Close the proposer. The object cannot be used afterwards."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params) -> list[_Prompt]:
        several = _as_prompts(prompts)
        params = _as_params(sampling_params, len(several))
        submitted: list[_Prompt] = []
        try:
            for prompt, each in zip(several, params, strict=True):
                submitted.append(self._submit_one(prompt, each))
        except BaseException:
            self._abort([request_id for earlier in submitted for request_id in earlier.request_ids])
            raise
        return submitted

    def _submit_one(self, prompt: Prompt, params: SamplingParams) -> _Prompt:
        if params.n == 1:
            return _Prompt([self.engine.add_request(prompt, params)])
        seeds = [None if params.seed is None else params.seed + index for index in range(params.n)]
        return _Prompt([self.engine.add_request(prompt, params.replace(n=1, seed=seed)) for seed in seeds])

    def _abort(self, request_ids: Sequence[str] | Mapping[str, Any]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)


class _Prompt:
    """One prompt on its way: the requests it became (several when n > 1), and those that ended."""

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self.finished: dict[str, Request] = {}

    def output(self) -> RequestOutput:
        requests = [self.finished[request_id] for request_id in self.request_ids]
        return RequestOutput(
            request_id=self.request_ids[0],
            prompt=requests[0].prompt,
            prompt_token_ids=tuple(requests[0].prompt_token_ids),
            outputs=tuple(_completion(index, request) for index, request in enumerate(requests)),
        )


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


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # text, mapping or token ids: one prompt
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(
            "SD-E133", "one SamplingParams per prompt", {"prompts": count, "sampling_params": len(params)}
        )
    return list(params)
