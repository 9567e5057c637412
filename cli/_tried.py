"""Which of the installed versions were tried together. The sources' noxfile.py writes the record, a cell a run."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import importlib_metadata
from packaging.version import Version

RECORD = Path(__file__).parents[1] / "assets" / "versions.json"
LIBRARIES = ("torch", "transformers")


def installed() -> dict[str, str]:
    """What decides most, by name. Raises PackageNotFoundError if one of them is absent."""
    return _comparable({"python": platform.python_version()} | {n: importlib_metadata.version(n) for n in LIBRARIES})


def said_of(versions: Mapping[str, str]) -> tuple[bool, str]:
    """Whether a run of the tests passed with just these versions, and which run, or what is missing."""
    cells = json.loads(RECORD.read_text(encoding="utf-8"))
    known = {name: _comparable(cell["versions"]) for name, cell in cells.items() if "versions" in cell}
    same = [name for name in known if known[name] == versions]
    if same:
        texts = (_sentence(name, cells[name]) for name in same)
        return any(cells[name]["passed"] for name in same), "; ".join(texts)
    new = {each: sorted({cell[each] for cell in known.values()}, key=Version) for each in versions}
    texts = (
        f"{each} {versions[each]} (tried: {', '.join(new[each])})"
        for each in versions
        if versions[each] not in new[each]
    )
    return False, "; ".join(texts) or "each of them was tried, and not together"


def _comparable(versions: Mapping[str, str]) -> dict[str, str]:
    """Python's minor, and libraries without the names of builds."""
    minor = ".".join(versions["python"].split(".")[:2])
    return {"python": minor} | {name: Version(versions[name]).public for name in LIBRARIES}


def _sentence(name: str, cell: Mapping[str, Any]) -> str:
    return f"{'passed' if cell['passed'] else 'failed'} as {name} on {cell['date']}, commit {cell['commit'][:8]}"
