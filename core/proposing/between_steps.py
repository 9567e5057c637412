"""What is looked at between steps: new weights before a proposer is handed them, and figures that it publishes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from numbers import Real

from torch import Tensor

from specdec.sdk.errors import ConfigError, PluginId, ProposerError

NAME = re.compile(r"[a-z][a-z0-9_]*")


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


def own_metrics(publish: Callable[[], object], plugin: PluginId) -> dict[str, float]:
    """Read what a plugin publishes. Names begin with `proposer_`. Raises ProposerError SD-E230 for no metric."""
    published = publish()
    if not isinstance(published, Mapping):
        raise _unusable(f"a {type(published).__name__}", plugin)
    for name, value in published.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise _unusable(f"the name {name!r:.80}", plugin)
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise _unusable(f"{name}: {value!r:.80}", plugin)
    prefix = prefix_of(plugin)
    return {prefix + name: float(value) for name, value in published.items()}


def prefix_of(plugin: PluginId) -> str:
    """The prefix of a proposer's figures: its name, or for a class path the class's."""
    return f"proposer_{re.sub(r'[^a-z0-9]+', '_', re.split(r'[.:]', plugin.name)[-1].lower()).strip('_')}_"


def _unusable(found: str, plugin: PluginId) -> ProposerError:
    facts = {
        "expected": "a mapping of names (lower-case letters, digits and underscores) to finite numbers",
        "found": found,
        "effect": "metrics are shown without this proposer's own",
    }
    return ProposerError("SD-E230", "the proposer published metrics that cannot be shown", facts, plugin=plugin)
