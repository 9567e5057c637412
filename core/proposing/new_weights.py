"""What is looked at before a proposer is handed new weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from specdec.sdk.errors import ConfigError, PluginId


def require_updatable(plugin: PluginId, methods: Collection[str]) -> None:
    """Raise ConfigError SD-E227 unless the proposer takes new weights."""
    if "update_weights" not in methods:
        facts = {
            "missing": "update_weights",
            "fix": "a proposer with a network, or ask for NewWeights() and implement update_weights(tensors)",
        }
        raise ConfigError("SD-E227", "this proposer takes no new weights", facts, plugin=plugin)


def as_tensors(tensors: object) -> Mapping[str, Tensor]:
    """Weights as they are. Raises ConfigError SD-E228 for what is no mapping of names to tensors."""
    if isinstance(tensors, Mapping):
        wrong = [f"{name!r}: {type(each).__name__}" for name, each in tensors.items() if not _is_weight(name, each)]
    else:
        wrong = [type(tensors).__name__]
    if wrong:
        facts = {"expected": "a mapping of names to tensors", "found": ", ".join(wrong[:6])}
        raise ConfigError("SD-E228", "these are no weights; nothing was changed", facts)
    return tensors  # type: ignore[return-value]


def _is_weight(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)
