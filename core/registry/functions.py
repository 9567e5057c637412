"""Functions that distributions offer by name, in an entry-point group of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from specdec.sdk.errors import PluginId, PluginLoadError, SpecdecError, not_offered

from .attribution import attributing
from .catalog import Registry
from .discovery import Kind, PluginSettings, discover, noun_of
from .importing import import_target

T = TypeVar("T")


def call_offered(
    kind: Kind, name: str, argument: object, form: Callable[[Any], T], settings: PluginSettings, ours: Iterable[str]
) -> T:
    """What the function of this name returns, in one form. ours: names that are not looked for here.

    Raises as `Registry.find` and `import_function` do; ConfigError SD-E132 if nobody has it, PluginLoadError SD-E118.
    """
    offered, noun = Registry(discover(kind, settings)), noun_of(kind)
    entry = offered.find(name)
    if entry is None:
        raise not_offered(f"there is no such {noun}", name, [*ours, *(each.name for each in offered.entries)])
    function = import_function(entry.plugin, noun)
    with attributing("SD-E118", f"the {noun}", entry.plugin, SpecdecError):
        return form(function(argument))


def import_function(plugin: PluginId, noun: str) -> Callable[[Any], Any]:
    """What is offered, if it can be called. Raises as `import_target` does, and PluginLoadError SD-E118 if not."""
    found: Callable[[Any], Any] = import_target(plugin, noun)
    if not callable(found):
        facts = {"found": repr(found)}
        raise PluginLoadError("SD-E118", f'the {noun} "{plugin.name}" cannot be called', facts, plugin=plugin)
    return found
