"""One request on its way through the engine: its tokens, where it stands, and why it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch

from specdec.sdk import RequestView

from ..config.sampling_params import SamplingParams
from ..kernels.philox import draft_key
from .detokenizer import Detokenizer
from .metrics import RequestMetrics


class Status(Enum):
    """Where a request is: in which of the scheduler's queues, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended, in the words of the OpenAI API."""

    STOP = "stop"  # end of sequence, a stop token or a stop text
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"


@dataclass(eq=False)
class Request:
    """State of one request. Only the engine and its scheduler write to it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int  # prompt and output, after max_model_len
    end_token_ids: frozenset[int]  # tokens that end it (end of sequence unless ignored, stop tokens)
    detokenizer: Detokenizer | None
    prompt: str | None = None
    options: Any = None  # what the proposer's RequestOptions made of params.extra_args
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    row: int = -1
    generation: int = 0
    started: bool = False
    num_computed_tokens: int = 0  # tokens with KV in the cache
    blocks: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    output_counts: Counter[int] = field(default_factory=Counter)  # kept for penalised requests only
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens without KV: 1 while decoding, more before the prompt is in the cache."""
        return len(self.token_ids) - self.num_computed_tokens

    @cached_property
    def penalised(self) -> bool:
        """Whether earlier tokens change its logits."""
        params = self.params
        return bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)

    @cached_property
    def _looks_at_each(self) -> bool:
        """Whether a token that does not end it changes more than its tokens."""
        return self.detokenizer is not None or self.penalised

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether its logits are changed before sampling at all."""
        return self.penalised or bool(self.params.logit_bias) or self.params.min_tokens > 0

    @cached_property
    def most_drafts(self) -> int:
        """How many drafts it may get in a step, as far as its parameters say."""
        limit = self.params.num_speculative_tokens if self.params.speculative else 0
        return self.max_total_tokens if limit is None else limit

    @cached_property
    def prompt_counts(self) -> Counter[int]:
        """How often each token stands in the prompt."""
        return Counter(self.prompt_token_ids)

    @cached_property
    def draft_key(self) -> int:
        """Key of its draft stream, which does not hand out the request's seed.

        It is 63 bits of a function of the seed and keeps no secret: who tries all small seeds finds the seed, and with
        it the verifier's uniforms.
        """
        return int(draft_key(torch.tensor(self.seed)))

    @property
    def view(self) -> RequestView:
        """What lifecycle methods and hooks see."""
        return RequestView(
            request_id=self.request_id,
            row=self.row,
            generation=self.generation,
            prompt_token_ids=self.prompt_token_ids,
            extra_args=self.params.extra_args or {},
            options=self.options,
            namespace=self.params.namespace,
        )

    def commit(self, token_ids: Sequence[int]) -> int:
        """Append sampled tokens until one ends the request. Returns how many were committed."""
        room = self.max_total_tokens - len(self.token_ids)
        if not self._looks_at_each and len(token_ids) < room and self.end_token_ids.isdisjoint(token_ids):
            self.token_ids += token_ids
            return len(token_ids)
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            if self.penalised:
                self.output_counts[token_id] += 1
            if self._ends_with(token_id):
                return count
        return len(token_ids)

    def _ends_with(self, token_id: int) -> bool:
        ended_by_token = token_id in self.end_token_ids and self.num_output_tokens > self.params.min_tokens
        stop_text = None
        if self.detokenizer is not None and not ended_by_token:
            stop_text = self.detokenizer.append(token_id, self.num_output_tokens > self.params.min_tokens)
        if ended_by_token or stop_text is not None:
            asked_for = token_id in self.params.stop_token_ids
            self._finish(FinishReason.STOP, token_id if ended_by_token and asked_for else stop_text)
        elif len(self.token_ids) >= self.max_total_tokens:
            self._finish(FinishReason.LENGTH, None)
        return self.finish_reason is not None

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def abort(self) -> None:
        """End the request where it stands."""
        self._finish(FinishReason.ABORT, None)
