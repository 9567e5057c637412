"""A proposer's shared state on disk: what it wrote, and a manifest that says whose it is and is put in place last."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from specdec.sdk.config import StrictModel
from specdec.sdk.errors import ConfigError, PluginId
from specdec.sdk.json_files import read_json_file

MANIFEST, FORMAT, PREFIX = "manifest.json", 1, "state-"
_NAME = re.compile(PREFIX + r"[a-z0-9_]{8}")  # as mkdtemp makes them


class Manifest(StrictModel):
    """Describes saved state: whose it is, and in which directory."""

    format: int
    proposer: str  # its label
    version: str | None  # of its distribution
    directory: str

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises ConfigError SD-E181 if there is none, or none that can be read."""
        try:
            manifest = cls.model_validate(read_json_file(path / MANIFEST), strict=True)
        except (OSError, ValueError, TypeError, ConfigError) as error:
            raise _unusable(path, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        if manifest.format != FORMAT or not _NAME.fullmatch(manifest.directory):
            raise _unusable(path, f"{MANIFEST} is of another format")
        return manifest


def as_path(value: Any) -> Path:
    """Where a user wants state to lie. Raises ConfigError SD-E132 for what is no path."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        facts = {"expected": "a directory as a text or a Path", "found": f"{value!r:.80}"}
        raise ConfigError("SD-E132", "the place of a proposer's state is no path", facts)
    return Path(value)


def require_state(plugin: PluginId, methods: Collection[str]) -> None:
    """Raise ConfigError SD-E179 unless the proposer can write its state and read it."""
    missing = [name for name in ("save", "load") if name not in methods]
    if missing:
        facts = {
            "expected": "State() among the extensions of its needs, with save(path) and load(path)",
            "never called": ", ".join(missing),
            "fix": 'leave "state_dir" out, or ask for State() and implement both',
        }
        raise ConfigError("SD-E179", "this proposer has no state to keep", facts, plugin=plugin)


def save_state(path: Path, plugin: PluginId, write: Callable[[Path], None]) -> None:
    """Have `write` fill a new directory below `path`; then, in one step, make it the state that is there.

    Raises ConfigError SD-E181 where the directory cannot be written to, or holds what this proposer did not save.
    What was saved before stays until then.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        earlier = find_state(path, plugin) if has_state(path) else None
        new = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path))
    except OSError as error:
        raise _unusable(path, error) from error
    draft = new.with_suffix(".json")
    try:
        write(new)
        manifest = Manifest(format=FORMAT, proposer=plugin.label, version=plugin.version, directory=new.name)
        draft.write_text(manifest.model_dump_json(), encoding="utf-8")
        os.replace(draft, path / MANIFEST)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unusable(path, error) from error
        raise
    if earlier is not None:
        shutil.rmtree(earlier, ignore_errors=True)


def find_state(path: Path, plugin: PluginId) -> Path:
    """The directory that this proposer wrote, no link. Raises ConfigError SD-E181, also for another one's state."""
    manifest = Manifest.read(path)
    if manifest.proposer != plugin.label or _series(manifest.version) != _series(plugin.version):
        facts = {
            "path": path,
            "written by": f"{manifest.proposer} {manifest.version or ''}".strip(),
            "fix": "give each proposer a directory of its own, or delete this one to begin anew",
        }
        raise ConfigError("SD-E181", "the saved state is another proposer's or version's", facts, plugin=plugin)
    found = path / manifest.directory
    if found.is_symlink() or not found.is_dir():
        raise _unusable(path, f"{manifest.directory} is no directory in it")
    return found


def has_state(path: Path) -> bool:
    """Whether anything was saved there, or something else has the manifest's name."""
    return os.path.lexists(path / MANIFEST)


def _series(version: str | None) -> list[str] | None:
    """Versions that understand each other's state: those of one major, below 1.0 of one minor."""
    if version is None:
        return None
    parts = version.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]


def _unusable(path: Path, reason: object) -> ConfigError:
    facts = {"path": path, "because": reason, "fix": "give a directory that state was saved to, or may be written to"}
    return ConfigError("SD-E181", "a proposer's saved state cannot be used", facts)
