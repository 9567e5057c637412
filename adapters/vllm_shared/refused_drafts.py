"""Drafts that a grammar refuses: the first stays, and vLLM's verifier rejects it.

vLLM ends a draft before such a token. Where that is depends on what was drawn. So verified by its probabilities, what
is left would not have the target's distribution. The mask of a place makes the refused token impossible there.

vLLM's scheduler is what cuts. It is in another process than the drafter, and may be in one without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

KEY = "specdec_keeps_refused_drafts"
"""In `additional_config`, which reaches every process."""

NO_DRAFT = -1  # fills vLLM's lists up


def must_stay(vllm_config: Any) -> bool:
    """Whether drafts are verified by their probabilities."""
    return bool(vllm_config.speculative_config.draft_sample_method == "probabilistic")


def stay(vllm_config: Any) -> bool:
    """Whether the first process said so. False in other people's configurations."""
    additional = vllm_config.additional_config
    return isinstance(additional, Mapping) and KEY in additional


def keeping(validate: Callable[..., list[int]], manager: Any, request: Any, spec_tokens: list[int]) -> list[int]:
    """StructuredOutputManager.validate_tokens, which tells the scheduler what is left of a draft."""
    allowed = validate(manager, request, spec_tokens)
    if not stay(manager.vllm_config):
        return allowed
    first_refused = spec_tokens[len(allowed) : len(allowed) + 1]
    return [*allowed, *[token_id for token_id in first_refused if token_id != NO_DRAFT]]


def without_refused(
    validate: Callable[..., list[int]],
    fill: Callable[..., Any],
    manager: Any,
    requests: Mapping[str, Any],
    request_ids: Sequence[str],
    drafts: dict[str, list[int]],
) -> Any:
    """StructuredOutputManager.grammar_bitmask, which logs an error for each draft that its grammar refuses.

    A place without a draft gets the same mask. validate, fill: the original `validate_tokens` and `grammar_bitmask`.
    """
    if stay(manager.vllm_config):
        drafts = dict(drafts)
        for request_id in drafts.keys() & set(request_ids):
            ids = drafts[request_id]
            allowed = validate(manager, requests[request_id], ids)
            drafts[request_id] = [*allowed, *[NO_DRAFT] * (len(ids) - len(allowed))]
    return fill(manager, requests, request_ids, drafts)
