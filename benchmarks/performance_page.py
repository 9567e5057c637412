"""Writes the tables of the page on performance from the recorded results: `python -m benchmarks.performance_page`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from . import memory, scaling
from .peers import report

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "performance.md"
RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """The page with the tables of what is recorded now."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]]()}\n\n{block[3]}", page)


def speeds() -> str:
    """Every comparison: its conditions, and tokens per second."""
    parts = [
        f"### {name}\n\n{report.conditions(result)}\n\n{report.speeds(result).markdown()}"
        for name, result in _comparisons()
    ]
    return "\n\n".join(parts) or NOTHING


def goals() -> str:
    """The goals of every comparison."""
    tables = ((name, report.goals(result)) for name, result in _comparisons())
    parts = [f"{name}:\n\n{table.markdown()}" for name, table in tables if table.rows]
    return "\n\n".join(parts) or NOTHING


def _comparisons() -> list[tuple[str, dict[str, Any]]]:
    """Each with the name that it was saved by."""
    paths = sorted(RESULTS.glob("peers-*.json"))
    return [(path.stem.removeprefix("peers-"), json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _one(module: Any) -> str:
    if not module.RESULT.is_file():
        return NOTHING
    return module.sheet(json.loads(module.RESULT.read_text(encoding="utf-8"))).markdown()


NOTHING = "No run is recorded in `benchmarks/results/`."
BLOCKS = {
    "speeds": speeds,
    "goals": goals,
    "scaling": lambda: _one(scaling),
    "memory": lambda: _one(memory),
}


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
