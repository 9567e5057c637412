"""Import a "module:Class" that the user named, and say precisely what is missing if that fails."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

from specdec.sdk.errors import PluginId, PluginLoadError, did_you_mean

from .attribution import attributing, author_frame


def import_target(plugin: PluginId, noun: str = "proposer") -> Any:
    """The object that `plugin.target` names. Nothing is checked about it.

    Raises PluginLoadError: SD-E102 if the module, something that it imports, or the attribute is missing;
    SD-E103 if importing raised something else.
    """
    module_name, _, path = plugin.target.partition(":")
    module = _import_module(module_name, plugin, noun)
    found: Any = module
    for name in filter(None, path.split(".")):
        try:
            with attributing("SD-E103", f"importing the {noun}", plugin, AttributeError):
                found = getattr(found, name)
        except AttributeError as error:
            raise _attribute_missing(module, found, name, plugin, noun) from error
    return found


def _import_module(name: str, plugin: PluginId, noun: str) -> ModuleType:
    try:
        with attributing("SD-E103", f"importing the {noun}", plugin, ImportError):
            return importlib.import_module(name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise _module_missing(missing, plugin, noun) from error
        raise _import_inside_failed(name, error, plugin, noun) from error


def _cannot_load(plugin: PluginId, noun: str, facts: dict[str, str | None]) -> PluginLoadError:
    told = {label: value for label, value in facts.items() if value}
    return PluginLoadError("SD-E102", f'cannot load {noun} "{plugin.name}"', told, plugin=plugin)


def _module_missing(missing: str, plugin: PluginId, noun: str) -> PluginLoadError:
    parent_name, _, last = missing.rpartition(".")
    parent = sys.modules.get(parent_name)
    siblings = {item.name for item in pkgutil.iter_modules(getattr(parent, "__path__", []) if parent else None)}
    suggestion = did_you_mean(last, siblings, cutoff=0.75)
    suggestion = suggestion and f"{parent_name}.{suggestion}".lstrip(".")
    facts = {
        "module": f'there is no module "{missing}"' + (f" in {_file(parent)}" if parent else " on the import path"),
        "did you mean": suggestion,
        "fix": "write the module's name without .py"
        if last == "py"
        else "install the distribution that has it, or correct the name"
        + ("" if plugin.distribution else "; a checkpoint is written as a path (./name) or as owner/name"),
    }
    return _cannot_load(plugin, noun, facts)


def _import_inside_failed(name: str, error: ImportError, plugin: PluginId, noun: str) -> PluginLoadError:
    absent = isinstance(error, ModuleNotFoundError) and error.name
    facts = {
        "module": f'"{name}" was found',
        "missing": f'its import of "{error.name}" failed: {error.msg}' if error.name else str(error),
        "where": author_frame(error, plugin.target),
        "fix": f'install what provides "{absent}"'
        if absent
        else "install the version that this plugin was written for",
    }
    return _cannot_load(plugin, noun, facts)


def _attribute_missing(module: ModuleType, holder: Any, name: str, plugin: PluginId, noun: str) -> PluginLoadError:
    suggestion = did_you_mean(name, (known for known in dir(holder) if not known.startswith("__")))
    module_name, _, path = plugin.target.partition(":")
    package = module_name.partition(".")[0]
    classes = [
        known
        for known, value in vars(holder).items()
        if isinstance(value, type) and value.__module__.partition(".")[0] == package
    ]
    facts = {
        "module": f'"{module_name}" imported from {_file(module)}',
        "missing": f'attribute "{name}"',
        "did you mean": suggestion and f"{module_name}:{path.removesuffix(name)}{suggestion}",
        "its classes": ", ".join(classes[:8]) or "none",
        "fix": f'name one of them, as in "{module_name}:{classes[0]}"' if classes and not suggestion else None,
    }
    return _cannot_load(plugin, noun, facts)


def _file(module: ModuleType) -> str:
    return module.__file__ or "a namespace package"
