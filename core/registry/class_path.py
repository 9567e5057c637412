"""Class paths: "package.module:Class", or "package.module.Class" where a checkpoint could stand as well."""

from __future__ import annotations

import re
from pathlib import Path

import importlib_metadata

from specdec.sdk.errors import ConfigError, PluginId

DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
WITH_COLON = re.compile(rf"{DOTTED}:{DOTTED}")
WITH_DOTS = re.compile(rf"{DOTTED}\.[^\W\d]\w*")


def class_path(model: str) -> str | None:
    """`model` as "module:Class" if it is a class path, else None (a checkpoint).

    Raises ConfigError SD-E109 if it could be both.
    """
    if WITH_COLON.fullmatch(model):
        return model
    if not WITH_DOTS.fullmatch(model):
        return None
    module, _, name = model.rpartition(".")
    if Path(model).is_dir():
        facts = {
            "found": f"a directory {Path(model).resolve()}",
            "use": f'"./{model}" for the directory, "{module}:{name}" for a class',
        }
        raise ConfigError("SD-E109", f'model "{model}" is a directory and may be a class path', facts)
    return f"{module}:{name}"


def unregistered(name: str, target: str) -> PluginId:
    """Who to blame for a class that no entry point offers: the one distribution that owns its package, if any."""
    package = target.partition(":")[0].partition(".")[0]
    owners = set(importlib_metadata.packages_distributions().get(package, ()))
    if len(owners) != 1:
        return PluginId(name, target)
    (owner,) = owners
    return PluginId(name, target, owner, importlib_metadata.version(owner))
