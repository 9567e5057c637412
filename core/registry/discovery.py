"""What installed distributions offer, read from their metadata: no plugin is imported here.

Entry-point groups: `specdec.proposers` (a name -> a class), `specdec.plugins` (hooks), others (a name -> a function).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from specdec.sdk.errors import PluginId
from specdec.sdk.lifecycle import SDK_DISTRIBUTION

from .class_path import DOTTED

Kind = Literal["proposers", "plugins", "datasets", "metrics_exporters", "grammars", "verification_rules"]
Status = Literal["ok", "broken", "duplicate", "blocked"]

TARGET = re.compile(rf"(?P<module>{DOTTED})\s*(:\s*(?P<attribute>{DOTTED}))?\s*(\[.*\])?")


@dataclass(frozen=True, kw_only=True)
class PluginEntry:
    """What a distribution offers under a name, and whether it can be used."""

    kind: Kind
    name: str
    target: str  # "module:Class"; of a hook plugin also "module"
    distribution: str | None
    version: str | None
    status: Status = "ok"
    code: str | None = None  # of the error that asking for it raises. None means that the status is ok
    reason: str | None = None  # why the status is not ok

    @property
    def label(self) -> str:
        """`dist:name`."""
        return self.plugin.label

    @property
    def plugin(self) -> PluginId:
        """The plugin that errors name."""
        return PluginId(self.name, self.target, self.distribution, self.version)

    def answers_to(self, asked: str) -> bool:
        """Whether `asked` is the name or `dist:name`, the distribution spelt in any normalised way."""
        distribution, colon, name = asked.rpartition(":")
        if not colon:
            return asked == self.name
        return name == self.name and self.distribution is not None and _same(distribution, self.distribution)

    def is_meant_by(self, word: str) -> bool:
        """Whether a word of an allow or deny list covers it: its name, its `dist:name`, or its whole distribution."""
        return self.answers_to(word) or (self.distribution is not None and _same(word, self.distribution))


@dataclass(frozen=True)
class PluginSettings:
    """Which plugins may be used. A list holds names, `dist:name`s or distributions; what is denied stays denied."""

    allow: frozenset[str] | None = None  # None: everything; empty: nothing
    deny: frozenset[str] = frozenset()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> PluginSettings:
        """SPECDEC_PLUGINS and SPECDEC_DISABLE_PLUGINS."""
        allow, deny = environment.get("SPECDEC_PLUGINS"), environment.get("SPECDEC_DISABLE_PLUGINS", "")
        return cls(None if allow is None else frozenset(_items(allow)), frozenset(_items(deny)))

    def blocks(self, entry: PluginEntry) -> str | None:
        """The reason why an entry may not be used, or None."""
        if any(entry.is_meant_by(word) for word in self.deny):
            return "denied (SPECDEC_DISABLE_PLUGINS or -p no:NAME)"
        if self.allow is not None and not any(entry.is_meant_by(word) for word in self.allow):
            return "not in the list of allowed plugins (SPECDEC_PLUGINS, --plugins or --no-plugins)"
        return None


def noun_of(kind: Kind) -> str:
    """The noun for one entry of a kind, in a sentence."""
    return kind.removesuffix("s").replace("_", " ")


def discover(kind: Kind, settings: PluginSettings) -> tuple[PluginEntry, ...]:
    """The rows of an entry-point group, sorted by name."""
    return with_status(read_entry_points(kind), settings)


def with_status(entries: Iterable[PluginEntry], settings: PluginSettings) -> tuple[PluginEntry, ...]:
    """Mark what is blocked, and names that are offered more than once. Broken rows stay as they are."""
    rows = [_blocked(entry, settings) for entry in dict.fromkeys(entries)]
    usable: dict[str, list[PluginEntry]] = {}
    for row in rows:
        if row.status == "ok":
            usable.setdefault(row.name, []).append(row)
    told = (_duplicate(row, usable.get(row.name, ())) for row in rows)
    return tuple(sorted(told, key=lambda row: (row.name, row.label)))


def read_entry_points(kind: Kind) -> Iterator[PluginEntry]:
    """The entries of every installed distribution, as found; of two copies of one the first on the path."""
    group = f"specdec.{kind}"
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        if not _mentions(distribution, group):  # a name takes time to read, and this is true of nearly all
            continue
        try:
            name = canonicalize_name(distribution.name)
        except Exception:  # leftovers of an installation without a readable name: nobody can be asked for or blamed
            continue
        if name not in seen:
            seen.add(name)
            yield from _entries_of(importlib_metadata.distribution(name), kind, group)


def _mentions(distribution: importlib_metadata.IDistribution, group: str) -> bool:
    try:
        return group in (distribution.read_text("entry_points.txt") or "")
    except Exception:  # reported with the distribution's name
        return True


def _entries_of(distribution: importlib_metadata.IDistribution, kind: Kind, group: str) -> Iterator[PluginEntry]:
    try:
        points = tuple(distribution.entry_points.select(group=group))
    except Exception as error:
        yield _broken(_row(kind, distribution), f"its entry_points.txt cannot be read: {error!r}")
        return
    if not points:
        return
    row = _row(kind, distribution)
    unmet = unmet_sdk_requirement(distribution.requires or ())
    for point in points:
        match = TARGET.fullmatch(point.value.strip())
        if match is None or (kind != "plugins" and match["attribute"] is None):
            named = replace(row, name=point.name, target=point.value)
            yield _broken(named, f'malformed entry point {point.value!r}; expected "package.module:Class"')
            continue
        target = ":".join(filter(None, (match["module"], match["attribute"])))
        entry = replace(row, name=point.name, target=target)
        yield _broken(entry, unmet, "SD-E120") if unmet else entry


def _row(kind: Kind, distribution: importlib_metadata.IDistribution) -> PluginEntry:
    return PluginEntry(kind=kind, name="?", target="", distribution=distribution.name, version=distribution.version)


def unmet_sdk_requirement(requirements: Sequence[str]) -> str | None:
    """Why a distribution's own requirements exclude the installed SDK, or None."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if not _same(requirement.name, SDK_DISTRIBUTION) or (requirement.marker and not requirement.marker.evaluate()):
            continue
        installed = importlib_metadata.version(SDK_DISTRIBUTION)
        if not requirement.specifier.contains(installed, prereleases=True):
            return f"it requires {requirement.name}{requirement.specifier}; installed is {installed}"
    return None


def _blocked(entry: PluginEntry, settings: PluginSettings) -> PluginEntry:
    reason = settings.blocks(entry)
    return replace(entry, status="blocked", code="SD-E104", reason=reason) if reason else entry


def _duplicate(entry: PluginEntry, same_name: Sequence[PluginEntry]) -> PluginEntry:
    if entry.status != "ok" or len(same_name) == 1:
        return entry
    others = ", ".join(f"{other.label} ({other.target})" for other in same_name if other is not entry)
    reason = f"the name is also offered by {others}; ask for {entry.label!r}"
    return replace(entry, status="duplicate", code="SD-E112", reason=reason)


def _broken(entry: PluginEntry, reason: str, code: str = "SD-E103") -> PluginEntry:
    return replace(entry, status="broken", code=code, reason=reason)


def _same(one: str, other: str) -> bool:
    return canonicalize_name(one) == canonicalize_name(other)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
