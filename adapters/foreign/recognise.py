"""What was written for other engines: their classes, their words in a class of ours, and vLLM's keys."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from specdec.sdk.errors import SpecdecWarning
from specdec.sdk.hooks import hookimpl
from specdec.sdk.proposer_protocol import Proposer

from .vllm_keys import refused_values, vllm_keys

CALLED_ELSEWHERE = {
    "load_model": "bind(target, services)",
    "dummy_run": "warmup()",
    "initialize_cudagraph_keys": "warmup(), and Services.capture",
    "initialize_attn_backend": "Needs(extensions=(DraftKV(...),)), and Services in bind",
    "prepare_inputs": "propose(step), whose view has them",
    "prepare_next_token_ids_cpu": "propose(step), whose view has them",
    "get_candidates": "propose(step)",
    "update_candidate_strategy": "observe(step)",
}
"""Methods that other engines call on a drafter, and what does their work here."""


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
    _warn_of_others_words(candidate)
    return None


@hookimpl
def explain_key(key: str, value: Any) -> str | None:
    """What becomes of a key of vLLM's."""
    known = vllm_keys().get(key)
    return refused_values().get(key, {}).get(str(value)) if known is None else known.answer(value)


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


def _warn_of_others_words(candidate: type) -> None:
    """What the class calls itself is a helper of its own."""
    functions = [value for base in candidate.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    called = {name for each in functions for name in each.__code__.co_names}
    for name, here in CALLED_ELSEWHERE.items():
        method = _method(candidate, name)
        if method is not None and name not in called:
            place = f"{method.__code__.co_filename}:{method.__code__.co_firstlineno}"
            text = (
                f"{candidate.__name__}.{name} ({place}) is never called by the engine: another engine's word; here it"
            )
            warnings.warn(f"{text} is {here}", SpecdecWarning, stacklevel=2)


def _method(candidate: type, name: str) -> Callable[..., Any] | None:
    found = inspect.getattr_static(candidate, name, None)
    return found if inspect.isfunction(found) else None


def _accepts(function: Callable[..., Any], *arguments: object, **keywords: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except (TypeError, ValueError):
        return False
    return True
