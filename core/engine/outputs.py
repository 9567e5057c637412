"""What the user gets back; names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One output of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None  # the token id or text that stopped it; None for end of sequence and length
    logprobs: tuple[dict[int, float], ...] | None
    spec_decode_metrics: dict[str, Any]

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum the log-probabilities of the output's tokens. None where none were asked for."""
        if self.logprobs is None:
            return None
        return sum(each[token_id] for each, token_id in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The outputs of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    num_cached_tokens: int | None = None  # of the prompt, which its first output did not compute; None: none can be


@dataclass(frozen=True, kw_only=True)
class StreamUpdate:
    """What one step did to one request: the text that is new, and how it came about."""

    request_id: str
    index: int  # which output of its prompt
    text: str  # new since the last update
    token_ids: tuple[int, ...]  # committed in this step: accepted drafts, then one recovered or bonus token
    draft_token_ids: tuple[int, ...]  # what was offered; of a tree, the accepted path, what was met at its end, others
    num_accepted: int
    finish_reason: str | None
    logprobs: tuple[dict[int, float], ...] | None = None  # of `token_ids`, where they were asked for
    draft_parents: tuple[int, ...] | None = None
    """Of a tree: where in `draft_token_ids` the parent of each draft stands; -1 is the newest token. None: a chain."""
