"""What is to be handed over: a target, a checked config, and the proposer that it means; and what is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specdec.core.host import SpeculativeConfig, SpeculativeSettings, registry, with_verifier
from specdec.sdk.check import check_class
from specdec.sdk.errors import ConfigError, PluginId
from specdec.sdk.packaged import packaged

Route = Literal["native", "adapter"]
"""The engine's own drafter (or a class that was written for it), or the proposer of this installation in it."""


@dataclass(frozen=True)
class Asked:
    """The proposer is found and imported; neither model is loaded."""

    model: str  # as the other engine is told it
    config: SpeculativeConfig
    resolved: registry.ResolvedProposer

    @classmethod
    def read(cls, model: str, settings: SpeculativeSettings, plugins: registry.PluginSettings) -> Asked:
        """Raises ConfigError or PluginLoadError as the engine would."""
        target, asked = with_verifier(model, settings)
        if asked is None:
            raise ConfigError("SD-E133", "there is no speculative_config to hand over", {"fix": "-sc '{...}'"})
        config = SpeculativeConfig.parse(asked)
        resolved = registry.Registry.discover(plugins, registry.load_hooks(plugins)).resolve(config)
        check_class(resolved.cls, resolved.plugin)
        return cls(str(packaged(str(target)) or target), config, resolved)

    @property
    def plugin(self) -> PluginId:
        return self.resolved.plugin

    @property
    def options(self) -> dict[str, object]:
        """The proposer's own, wherever they were written."""
        return {**self.config.proposer_config, **self.config.unclaimed}

    @property
    def written(self) -> dict[str, object]:
        """The common keys that the user wrote, in order of the config's fields."""
        fields = type(self.config).model_fields
        return {name: getattr(self.config, name) for name in fields if name in self.config.model_fields_set}


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """How another engine runs the same target and proposer."""

    engine: str
    route: Route
    text: str  # a shell command or lines of Python
    settings: Mapping[str, object]  # as the engine takes them
    dropped: Mapping[str, str] = field(default_factory=dict)  # key -> why it does not survive
    notes: tuple[str, ...] = ()  # what differs all the same
