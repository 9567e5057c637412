"""Recognise classes that can be called as the other engine calls them, and not as ours does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from specdec.sdk.hooks import hookimpl
from specdec.sdk.proposer_protocol import Proposer


@hookimpl
def adapt_proposer(candidate: Any) -> type[Proposer] | None:
    """A proposer around a class for vLLM's `custom_class`, or a transformers candidate generator; None for others."""
    if not isinstance(candidate, type):
        return None
    if is_vllm_class(candidate):
        from .vllm_class import VllmClass

        return VllmClass.around(candidate)
    if is_candidate_generator(candidate):
        from .candidate_generator import CandidateGenerator

        return CandidateGenerator.around(candidate)
    return None


def is_vllm_class(candidate: type) -> bool:
    """`__init__(vllm_config)`, `propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=...)`."""
    propose = _method(candidate, "propose")
    if propose is None or _accepts(propose, "self", "step"):
        return False
    arguments = ("self", "sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu")
    return _accepts(propose, *arguments, slot_mappings=None) and _accepts(candidate, "vllm_config")


def is_candidate_generator(candidate: type) -> bool:
    """`get_candidates(input_ids)`, and no `propose`."""
    draft = _method(candidate, "get_candidates")
    return draft is not None and _method(candidate, "propose") is None and _accepts(draft, "self", "input_ids")


def _method(candidate: type, name: str) -> Callable[..., Any] | None:
    found = inspect.getattr_static(candidate, name, None)
    return found if inspect.isfunction(found) else None


def _accepts(function: Callable[..., Any], *arguments: object, **keywords: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except (TypeError, ValueError):
        return False
    return True
