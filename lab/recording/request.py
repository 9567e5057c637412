"""One recorded request: a row of a shard."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.sdk.structured_outputs import StructuredOutputs


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedRequest:
    """T committed tokens after P prompt tokens, and the target's m likeliest tokens at each of the T positions.

    Probabilities are those that verification reads: after bias, penalties, temperature and filters. For a greedy
    request they are those at temperature 1. Where none were recorded m is 0, and numbers per position are NaN.
    """

    request_id: str
    number: int  # its place in the order in which requests were submitted
    prompt_id: str  # of the dataset
    turn: int  # of its conversation, from 0
    category: str
    prompt: str | None
    text: str
    seed: int
    prompt_token_ids: tuple[int, ...]  # [P]
    token_ids: tuple[int, ...]  # [T] committed, the end of sequence included
    past_token_ids: tuple[int, ...]  # what the target says after its end: drafts reach past it
    finish_reason: str  # "stop", "length", or "error" where its grammar allowed nothing more
    top_ids: Tensor  # [T, m] int64, the likeliest first
    top_logprobs: Tensor  # [T, m] float32
    token_logprobs: Tensor  # [T] float32, of the committed tokens
    tail_mass: Tensor  # [T] float32, the probability of every token that is not in top_ids
    entropy: Tensor  # [T] float32, in nats
    structured_outputs: StructuredOutputs | None = None  # the form that its text has. None: it is free
