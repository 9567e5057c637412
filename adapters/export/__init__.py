"""Write what to run in another engine in the place of `LLM(model, speculative_config=...)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from specdec.core.host import SpeculativeSettings, registry
from specdec.sdk.errors import ConfigError

from . import in_transformers, in_vllm
from .asked import Asked, HandOver

__all__ = ["ENGINES", "HandOver", "hand_over"]

ENGINES: Mapping[str, Callable[[Asked], HandOver]] = MappingProxyType(
    {"vllm": in_vllm.hand_over, "transformers": in_transformers.hand_over}
)


def hand_over(engine: str, model: str, config: SpeculativeSettings, plugins: registry.PluginSettings) -> HandOver:
    """How `engine` runs `model` with the proposer of `config`. Imports the proposer, loads nothing.

    Raises ConfigError: SD-E198 for an engine without an adapter, and otherwise what the config would raise here.
    """
    if engine not in ENGINES:
        raise ConfigError("SD-E198", f'there is no adapter for "{engine}"', {"engines": ", ".join(ENGINES)})
    return ENGINES[engine](Asked.read(model, config, plugins))
