"""Classes of ours that vLLM's `speculative_config` names, and vLLM would not run as a drafter."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from specdec.sdk.errors import ConfigError

from ..vllm import PREFIX


def refuse_wrong_class(speculative: Any) -> None:
    """Raise ConfigError SD-E215 if `model` is something that vLLM would not run as a drafter.

    speculative: vLLM's SpeculativeConfig as the user filled it in, with a model of this package.
    """
    model, method = speculative.model, speculative.method
    if model == PREFIX or not (model.startswith(PREFIX) or _is_drafter(model)):
        facts = {"found": f'"model": "{model}"', "fix": f'"model": "{PREFIX}NAME", where NAME is the proposer\'s name'}
        raise ConfigError("SD-E215", "vLLM's speculative_config names no class of the adapter", facts)
    if method not in (None, "custom_class"):
        facts = {"found": f'"method": "{method}", "model": "{model}"'}
        facts["effect"] = f'vLLM would run its own method "{method}", and no proposer of ours'
        facts["fix"] = f'"model": "{model}" alone; without "model" vLLM runs its own'
        raise ConfigError("SD-E215", "vLLM's speculative_config names a method beside the class", facts)


def _is_drafter(model: str) -> bool:
    """Whether it is the path of a class that goes on from the adapter's, as that which records does."""
    from ..vllm_v1.drafter import Drafter

    try:
        found = resolve_name(model)
    except (ImportError, AttributeError, ValueError):  # ValueError: it is no path of Python's
        return False
    return isinstance(found, type) and issubclass(found, Drafter)
