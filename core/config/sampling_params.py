"""How one request is to be sampled and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from specdec.sdk.config import StrictModel, StructuredOutputs
from specdec.sdk.errors import ConfigError
from specdec.sdk.ranges import (
    INT64_MAX,
    Bias,
    Factor,
    Limit,
    LimitOrZero,
    Outputs,
    Penalty,
    PositiveShare,
    Seed,
    Share,
    Temperature,
    TokenId,
    TopK,
)


class SamplingParams(StrictModel):
    """Names, meanings and defaults are vLLM's where it has them.

    Filters apply in the order temperature, min_p, top_k, top_p; ties at a threshold are kept. Speculation never
    changes what is sampled, so its two fields are about speed only.
    """

    temperature: Temperature = Field(default=1.0, description="0: greedy, the lowest id wins a tie")
    top_k: TopK = Field(default=0, description="0 or -1: off")
    top_p: PositiveShare = Field(default=1.0, description="the likeliest tokens that make up this mass; 1: off")
    min_p: Share = Field(default=0.0, description="tokens at least this likely, relative to the likeliest; 0: off")
    seed: Seed | None = Field(default=None, description="None: derived from the engine's seed and the request's number")
    max_tokens: Limit = Field(default=16, description="output tokens, at most; None: as many as fit")
    min_tokens: LimitOrZero = Field(default=0, description="no end of sequence and no stop token before this many")
    stop: tuple[str, ...] = Field(default=(), description="texts that end the request; not part of its output")
    include_stop_str_in_output: bool = Field(default=False, description="the text ends with the stop text")
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), description="tokens that end the request")
    ignore_eos: bool = Field(default=False, description="go on after an end of sequence")
    repetition_penalty: Factor = Field(default=1.0, description="of prompt and output tokens")
    frequency_penalty: Penalty = Field(default=0.0, description="of output tokens, for each occurrence")
    presence_penalty: Penalty = Field(default=0.0, description="of output tokens, once")
    logit_bias: dict[int, Bias] | None = Field(default=None, description="token id -> what is added to its logit")
    logprobs: int | None = Field(default=None, ge=0, le=20, description="also return this many top log-probabilities")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="the form that the output must have: a JSON schema, an expression, a grammar"
    )
    n: Outputs = Field(default=1, description="independent outputs per prompt")
    detokenize: bool = Field(default=True, description="False: token ids only")
    skip_special_tokens: bool = Field(default=True, description="leave special tokens out of the text")
    speculative: bool = Field(default=True, description="False: no drafts for this request")
    num_speculative_tokens: LimitOrZero | None = Field(default=None, description="at most this many drafts a step")
    extra_args: dict[str, Any] | None = Field(
        default=None,
        description="'specdec': what the proposer's RequestOptions read; other keys are not ours",
    )
    namespace: str = Field(
        default="",
        description="within a namespace only, requests share KV blocks, and proposers what they learn of them",
    )

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str | int) else value

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _from_mapping(cls, value: Any) -> Any:
        return StructuredOutputs.parse(value, "structured_outputs") if isinstance(value, Mapping) else value

    @field_validator("max_tokens", mode="before", json_schema_input_type=Limit | None)
    @classmethod
    def _none_is_no_limit(cls, value: Any) -> Any:
        return INT64_MAX if value is None else value

    @field_validator("top_k")
    @classmethod
    def _zero_is_off(cls, value: int) -> int:
        return max(value, 0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if any(text == "" for text in self.stop):
            raise ValueError("stop contains an empty text, which every output contains")
        return self

    @property
    def greedy(self) -> bool:
        """Whether the argmax is taken, so that no random number is used."""
        return self.temperature == 0


def params_of_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Give each of `count` prompts its parameters. Raises ConfigError SD-E132 for a wrong type, SD-E133 for a wrong
    number.
    """
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(isinstance(each, SamplingParams) for each in params):
        facts = {"expected": "a SamplingParams, or one per prompt in a list", "found": f"{params!r:.80}"}
        raise ConfigError("SD-E132", "sampling_params are no SamplingParams", facts)
    if len(params) != count:
        sizes = {"prompts": count, "sampling_params": len(params)}
        raise ConfigError("SD-E133", "one SamplingParams per prompt", sizes)
    return list(params)
