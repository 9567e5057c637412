"""The models that ship with the package, by their short names."""

from __future__ import annotations

from pathlib import Path

_ASSETS = Path(__file__).parents[1] / "assets"
_DEFAULT_MODEL = "target"


def packaged(name: str) -> Path | None:
    """The directory of "tiny" (the target) or "tiny/NAME" (one of its drafters). None means another name."""
    family, _, member = name.partition("/")
    if not family.isidentifier() or "/" in member or member.startswith("."):
        return None
    directory = _ASSETS / family / (member or _DEFAULT_MODEL)
    return directory if (directory / "config.json").is_file() else None
