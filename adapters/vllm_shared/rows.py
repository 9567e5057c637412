"""vLLM's requests as the core's: each with a stable row, a generation, and blocks for draft KV."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Self

from specdec.core.host import BlockPool, Request, RowTable, registry
from specdec.sdk import TargetInfo
from specdec.sdk.errors import message
from specdec.sdk.extensions import DraftKV

from ..request_options import read_running, sampled_alike

logger = logging.getLogger("specdec")


class RequestRows(RowTable):
    """The requests that vLLM has not finished. One has a row while it runs, until it ends or is preempted.

    vLLM moves requests about in its batch and names none by a lasting index. At most as many run as there are rows.
    """

    def __init__(self, num_rows: int, pool: BlockPool) -> None:
        super().__init__(num_rows, pool)
        self.requests: dict[str, Request] = {}

    @classmethod
    def with_blocks(cls, info: TargetInfo, lookahead: int | None) -> Self:
        """Rows that each have blocks for the full length. Untouched pages of a CPU cost nothing.

        `lookahead`: positions past the newest token. None: nobody keeps KV.
        """
        per_row = 0 if lookahead is None else -(-(info.max_model_len + lookahead) // info.block_size)
        return cls(info.max_num_seqs, BlockPool(info.max_num_seqs * per_row, info.block_size, per_row))

    def hold(self, request: Request, num_tokens: int) -> None:
        """Have blocks for so many tokens of a request with a row."""
        self.pool.extend(request.blocks, num_tokens)

    def unseat(self, request: Request) -> None:
        """Take a request's row and blocks back, if it has a row."""
        if request.row >= 0:
            super().unseat(request)

    def remove(self, request_ids: Iterable[str]) -> list[Request]:
        """Forget requests that ended. Returns those that were known."""
        known = [request_id for request_id in request_ids if request_id in self.requests]
        return [self.requests.pop(request_id) for request_id in known]


def as_request(request_id: str, state: Any, max_model_len: int, loaded: registry.LoadedProposer) -> Request:
    """vLLM's request as the core's. It gets no drafts if its `extra_args` are not what the proposer takes.

    state: its CachedRequestState in the worker.
    """
    theirs = state.sampling_params
    prompt = list(state.prompt_token_ids)
    max_tokens = max_model_len if theirs.max_tokens is None else theirs.max_tokens
    ends = set(theirs.stop_token_ids or ())
    if theirs.eos_token_id is not None:
        ends.add(theirs.eos_token_id)
    options, limits = read_running(loaded, theirs.extra_args, request_id)
    params = sampled_alike(
        request_id,
        loaded.plugin,
        temperature=theirs.temperature,
        top_k=theirs.top_k,
        top_p=theirs.top_p,
        min_p=theirs.min_p,
        max_tokens=max_tokens,
        min_tokens=min(theirs.min_tokens, max_tokens),
        extra_args=theirs.extra_args,
        speculative=limits.speculative and _may_draft_after(state.mm_features, loaded, request_id),
        num_speculative_tokens=limits.num_speculative_tokens,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        seed=_draft_seed(request_id, theirs.seed),
        max_total_tokens=min(len(prompt) + max_tokens, max_model_len),
        end_token_ids=frozenset(ends),
        detokenizer=None,
        options=options,
    )


def _may_draft_after(features: Sequence[Any] | None, loaded: registry.LoadedProposer, request_id: str) -> bool:
    """Whether a proposer can draft for a prompt with images or audio, whose placeholders are tokens like any other.

    The target's hidden states know what is in their place. The embedding of a placeholder does not, and a network that
    reads nothing else would draft from a text full of holes.
    """
    needs = loaded.needs
    blind = 0 in needs.hidden_states or (needs.extension(DraftKV) is not None and not needs.hidden_states)
    if not features or not blind:
        return True
    facts = {"request": request_id, "found": f"{len(features)} images, sounds or videos in the prompt"}
    facts |= {"effect": "no drafts for this request"}
    facts |= {"fix": "a proposer without a network, such as ngram, or one that reads hidden states of layers"}
    logger.warning("%s", message("SD-W281", "the proposer's network reads embeddings of text only", facts))
    return False


def _draft_seed(request_id: str, seed: int | None) -> int:
    """The request's own, or one that every worker derives alike. vLLM's verifier draws from another generator."""
    if seed is not None:
        return seed % 2**63
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=7).digest())
