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
    """The plugin of a class that no entry point offers. It belongs to the one distribution that has its package."""
    package = target.partition(":")[0].partition(".")[0]
    owners = {owner.name: owner for owner in importlib_metadata.distributions() if _has(owner, package)}
    if len(owners) != 1:
        return PluginId(name, target)
    (owner,) = owners.values()
    return PluginId(name, target, owner.name, owner.version)


def _has(distribution: importlib_metadata.IDistribution, package: str) -> bool:
    """Whether `importlib.metadata.packages_distributions` would list it under the package.

    That function parses the file list of every distribution, which takes longer than loading a small target.
    """
    declared = distribution.read_text("top_level.txt")
    if declared:
        return package in declared.split()
    if package not in (distribution.read_text("RECORD") or ""):
        return False
    return any(file.parts[0] in (package, f"{package}.py") for file in distribution.files or ())
