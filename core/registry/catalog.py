"""Every proposer that somebody offers, and which of them a `speculative_config` means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import PluginId, PluginLoadError, SpecdecError, did_you_mean
from specdec.sdk.packaged import packaged

from ..config.speculative_config import SpeculativeConfig
from .attribution import attributing
from .class_path import WITH_COLON, class_path, unregistered
from .discovery import PluginEntry, PluginSettings, noun_of, read_entry_points, with_status
from .hooks import HookPlugins, Offer
from .importing import import_target

CLASS_PATH_METHOD = "custom_class"
"""The word for "the class path stands in `model`"."""


@dataclass(frozen=True)
class ResolvedProposer:
    """The imported object that a config means, not checked yet, and its checkpoint."""

    plugin: PluginId
    cls: Any
    model: str | None  # the checkpoint; None if the config has none or its `model` was a class path
    hooks: HookPlugins = field(default_factory=HookPlugins)


@dataclass(frozen=True)
class Registry:
    """All rows. Reading them imports no plugin; resolving imports the one that was named."""

    entries: tuple[PluginEntry, ...]
    recognisers: tuple[Offer, ...] = ()
    hooks: HookPlugins = field(default_factory=HookPlugins)

    @classmethod
    def discover(cls, settings: PluginSettings, hooks: HookPlugins | None = None) -> Self:
        """Entry points of installed distributions, and what hook plugins register.

        hooks: None means none. Raises PluginLoadError SD-E118 if a `register_*` hook fails.
        """
        hooks = hooks or HookPlugins()
        offered = (*read_entry_points("proposers"), *hooks.proposers())
        return cls(with_status(offered, settings), hooks.recognisers(), hooks)

    def resolve(self, config: SpeculativeConfig) -> ResolvedProposer:
        """The proposer that `method`, or `model` alone, means. A checkpoint that is alone is opened and asked.

        Raises PluginLoadError (SD-E101 .. SD-E104, SD-E107, SD-E108, SD-E112, SD-E120) or ConfigError (SD-E105,
        SD-E106, SD-E109).
        """
        model, method = config.model, config.method
        if model is not None:
            target = class_path(model) if method in (None, CLASS_PATH_METHOD) else None
            if target is not None:
                return self._imported(self._by_class_path(target), None)
            model = str(packaged(model) or model)
        if method is None:
            assert model is not None, "SpeculativeConfig requires method or model"
            method = _recognised(Checkpoint.open(model), self.recognisers)
        return self._imported(self.plugin(method), model)

    def plugin(self, method: str) -> PluginId:
        """The plugin that a `method` means: a registered name, `dist:name`, "package.module:Class", or a hook's answer.

        Raises as `find` does, and PluginLoadError SD-E101 if nobody knows it. Imports nothing.
        """
        entry = self.find(method)
        if entry is not None:
            return entry.plugin
        if WITH_COLON.fullmatch(method):
            return self._by_class_path(method)
        target = self.hooks.relay.resolve_proposer(spec=method)
        if target is None:
            raise self._unknown(method)
        return unregistered(method, target)

    def find(self, name: str) -> PluginEntry | None:
        """The usable entry of a name or `dist:name`; None if nobody offers it.

        Raises PluginLoadError: SD-E112 offered more than once, SD-E104 blocked, SD-E103 broken, SD-E120
        written for another SDK.
        """
        rows = [entry for entry in self.entries if entry.answers_to(name)]
        usable = [entry for entry in rows if entry.status in ("ok", "duplicate")]
        chosen = [entry for entry in usable if entry.status == "ok"] or usable
        if len(chosen) == 1:
            return chosen[0]
        if chosen:
            raise _offered_twice(name, chosen)
        if rows:
            raise _not_usable(rows[0])
        return None

    def _imported(self, plugin: PluginId, model: str | None) -> ResolvedProposer:
        return ResolvedProposer(plugin, self.hooks.adapted(import_target(plugin)), model, self.hooks)

    def _by_class_path(self, target: str) -> PluginId:
        registered = [row.plugin for row in self.entries if row.target == target and row.status != "blocked"]
        return registered[0] if len(registered) == 1 else unregistered(target, target)

    def _unknown(self, name: str) -> PluginLoadError:
        labels = {entry.name: entry for entry in self.entries} | {entry.label: entry for entry in self.entries}
        suggestion = did_you_mean(name, labels)
        facts = {"did you mean": f'"{suggestion}"'} if suggestion else {}
        facts["installed"] = "\n".join(_described(entry) for entry in self.entries) or "no proposer at all"
        facts["fix"] = f"install the distribution that offers it; {_class_path_hint(name)}"
        if name == CLASS_PATH_METHOD:
            facts = {"fix": f'give the class path as the model: "method": "{name}", "model": "package.module.Class"'}
        return PluginLoadError("SD-E101", f'there is no proposer "{name}"', facts)


def _recognised(checkpoint: Checkpoint, recognisers: Sequence[Offer]) -> str:
    """The name of the one proposer that the checkpoint is for. recognisers: `register_speculator_config`'s offers.

    Raises PluginLoadError: SD-E107 if none or more than one claims it, SD-E108 if a recogniser raised.
    """
    claims: dict[str, PluginId] = {}
    for offer in recognisers:
        doing = f'reading the checkpoint "{checkpoint.directory}", plugin'
        with attributing("SD-E108", doing, offer.plugin, SpecdecError):
            if offer.value(checkpoint):
                claims[offer.name] = offer.plugin
    if len(claims) == 1:
        return next(iter(claims))
    asked = ", ".join(dict.fromkeys(offer.name for offer in recognisers))
    config = checkpoint.config
    told = {key: config[key] for key in ("model_type", "architectures", "speculators_model_type") if key in config}
    facts = {
        "found": told or f"keys {', '.join(config) or 'none'}",
        "claimed by": ", ".join(f"{name} [{plugin}]" for name, plugin in claims.items()) or "nobody",
        "asked": asked or "nobody: no installed plugin says which checkpoints it is for",
        "fix": 'name the proposer: "method": "NAME"',
    }
    problem = "more than one proposer is" if claims else "no proposer is known to be"
    raise PluginLoadError("SD-E107", f'{problem} for the checkpoint "{checkpoint.directory}"', facts)


def _described(entry: PluginEntry) -> str:
    note = "" if entry.status == "ok" else f"   {entry.status}"
    return f"{entry.name}   [{entry.plugin}]{note}"


def _class_path_hint(name: str) -> str:
    """The class path that was meant, if it can be told: ./my/module.py:Class, or package.module.Class."""
    file, _, attribute = name.removeprefix("./").replace(".py:", ":").replace("/", ".").rpartition(":")
    meant = f"{file}:{attribute}" if file else ":".join(name.rsplit(".", 1))
    path = meant if WITH_COLON.fullmatch(meant) else "package.module:Class"
    return f'a class of your own is "method": "{path}"'


def _offered_twice(name: str, rows: list[PluginEntry]) -> PluginLoadError:
    facts = {f"{row.distribution} {row.version}": row.target for row in rows}
    labels = dict.fromkeys(row.label for row in rows)
    if len(labels) > 1:
        facts["use"] = " or ".join(f'"{label}"' for label in labels)
    else:
        facts = {"targets": ", ".join(row.target for row in rows), "fix": "report it to the distribution's author"}
    return PluginLoadError("SD-E112", f'the name "{name}" is offered {len(rows)} times', facts)


def _not_usable(entry: PluginEntry) -> PluginLoadError:
    fixes = {
        "SD-E104": f"take it out of the list, or choose another {noun_of(entry.kind)}",
        "SD-E103": "reinstall or upgrade the distribution, or report it to its author",
        "SD-E120": f"upgrade specdec-sdk, or install another version of {entry.distribution}",
    }
    facts = {"found": entry.target, "reason": entry.reason, "fix": fixes[entry.code or "SD-E103"]}
    what = "was written for another specdec-sdk" if entry.code == "SD-E120" else f"is {entry.status}"
    summary = f'the {noun_of(entry.kind)} "{entry.name}" {what}'
    return PluginLoadError(entry.code or "SD-E103", summary, facts, plugin=entry.plugin)
