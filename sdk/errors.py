"""Every error that a user or a plugin author can meet.

    SpecdecError
    |- ConfigError          a setting is unknown, of the wrong type or out of range          exit code 2
    |  `- CheckpointError   a draft checkpoint is missing, broken or not implemented       exit code 2
    |- RequestError         one request cannot be served; other requests are not affected    exit code 2
    |- PluginLoadError      a proposer or plugin cannot be found, imported or called         exit code 3
    |  `- Refusal           a proposer and this engine or target do not fit                  exit code 3
    |- UnsupportedModelError  the target model cannot be served                              exit code 4
    |- ProposerError        a proposer raised or returned something unusable while running   exit code 1
    `- IntegrityError       the engine found its own state inconsistent: a bug of ours       exit code 1

A message is a stable code and one sentence, then one line per fact: what was expected, what was found, the fix.
"""

from __future__ import annotations

import copyreg
import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class PluginId:
    """Which plugin this is: the name that the user gave, and the installed distribution that it came from."""

    name: str
    target: str  # "module:Class"
    distribution: str | None = None  # None means a class path outside any installed distribution
    version: str | None = None

    @property
    def label(self) -> str:
        """`dist:name`, or the class path: the label in metrics, profiles and error lists."""
        return f"{self.distribution}:{self.name}" if self.distribution else self.target

    def __str__(self) -> str:
        return f"{self.label} {self.version}" if self.version else self.label


def message(code: str, summary: str, facts: Mapping[str, object], plugin: PluginId | None = None) -> str:
    """The text of an error or warning: a sentence behind its code, then one line per fact."""
    attribution = f"   [{plugin}]" if plugin else ""
    width = max((len(label) for label in facts), default=0)
    lines = [f"{code} {summary}{attribution}"]
    for label, value in facts.items():
        first, *rest = str(value).splitlines() or [""]
        lines.append(f"  {label:<{width}}  {first}")
        lines += [f"  {'':<{width}}  {line}" for line in rest]
    return "\n".join(lines)


class SpecdecError(Exception):
    """Base of all errors: a stable `code`, a sentence, and labelled facts."""

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        code: str,
        summary: str,
        facts: Mapping[str, object] | None = None,
        *,
        plugin: PluginId | None = None,
    ) -> None:
        self.code = code
        self.summary = summary
        self.facts: dict[str, object] = dict(facts or {})
        self.plugin = plugin
        super().__init__(message(code, summary, self.facts, plugin))

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is made anew of its args, which is the message alone: a pool of processes breaks on that.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(SpecdecError):
    """A setting is unknown, of the wrong type, or out of range."""

    exit_code = 2


class CheckpointError(ConfigError):
    """A draft checkpoint is missing, broken, or of a variant that is not implemented."""


class RequestError(SpecdecError, ValueError):
    """Raised when one request cannot be served as it was written."""

    exit_code = 2


class PluginLoadError(SpecdecError):
    """A proposer or plugin cannot be found, imported or called the way the engine calls it."""

    exit_code = 3


class Refusal(PluginLoadError):
    """A proposer declines a configuration, or the engine declines a proposer, before any weight is loaded.

    A proposer's `needs` raises it with the reason.

    reason: why it cannot run.
    what_would_work: what would work instead. None means nothing.
    """

    def __init__(self, reason: str, what_would_work: str | None = None, *, plugin: PluginId | None = None) -> None:
        self.reason = reason
        self.what_would_work = what_would_work
        facts = {"reason": reason} | ({"works": what_would_work} if what_would_work else {})
        super().__init__("SD-E121", "this proposer cannot run here", facts, plugin=plugin)

    def attributed_on(self, plugin: PluginId) -> Refusal:
        """The same refusal with the plugin's name in it."""
        return Refusal(self.reason, self.what_would_work, plugin=plugin)


class UnsupportedModelError(SpecdecError):
    """The target model cannot be served. The configuration gives the reason."""

    exit_code = 4


class ProposerError(SpecdecError):
    """A proposer raised, or returned an object that is not a draft for this step."""


class IntegrityError(SpecdecError):
    """The engine's own bookkeeping is inconsistent. Always a bug in specdec."""


class SpecdecWarning(UserWarning):
    """A fault that a plugin author should correct. It stops nothing."""


class SpecdecDeprecationWarning(SpecdecWarning):
    """A name, field or argument of the contract goes in a later version. docs/reference/versions.md has the policy."""

    def __init__(self, name: str, since: str, removed_in: str, instead: str) -> None:
        """since, removed_in: versions of the contract, such as "1.3" and "2.0". instead: what to use."""
        self.name, self.since, self.removed_in, self.instead = name, since, removed_in, instead
        super().__init__(f"{name} is deprecated since API {since} and goes in API {removed_in}: use {instead}")


def deprecated(name: str, *, since: str, removed_in: str, instead: str, stacklevel: int = 3) -> None:
    """Warn where what is deprecated was used. It is called by its getter, or by the function that takes the argument.

    name: as an author writes it. since, removed_in, instead: see `SpecdecDeprecationWarning`. stacklevel: of the
    author's line, as `warnings.warn` counts; 3 is the caller of the caller.
    """
    warnings.warn(SpecdecDeprecationWarning(name, since, removed_in, instead), stacklevel=stacklevel)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word closest to a misspelt one, or None if none is as similar as `cutoff` (0 .. 1)."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def not_offered(summary: str, found: str, offered: Sequence[str], **facts: str) -> ConfigError:
    """ConfigError SD-E132 for a word that is none of `offered`, with the one that was probably meant."""
    meant = did_you_mean(found, offered)
    told = {"found": repr(found)} | ({"did you mean": meant} if meant else {}) | {"offered": ", ".join(offered)}
    return ConfigError("SD-E132", summary, told | facts)
