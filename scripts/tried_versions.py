"""Run tests with the versions that are installed here, and write down what came of it. `nox` does so for each cell.

python -m scripts.tried_versions CELL TESTS...   run them, add the cell to assets/versions.json, write the page
python -m scripts.tried_versions CELL --because TEXT   note why it cannot be run here
python -m scripts.tried_versions                 write docs/reference/tried-versions.md again
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "assets" / "versions.json"
PAGE = ROOT / "docs" / "reference" / "tried-versions.md"
SDK = "specdec-sdk"
SHOWN = ("python", "torch", "transformers", "numpy", "pydantic", "safetensors")
HEAD = """\
# Which versions were tried

Each row is a run of a slice of the tests, in an environment of its own. `nox -s CELL` repeats it
([noxfile.py](../../noxfile.py)). `specdec doctor` says what was tried of what you have installed. What each engine
was shown to do has a [page of its own](engines.md).

| cell | date | commit | {shown} | result |
|---|---|---|{dashes}---|
"""
TAIL = """
`scripts/tried_versions.py` writes this page from `assets/versions.json`, which has the versions of all requirements.
"""


def installed() -> dict[str, str]:
    """The version of Python and of each distribution that ours requires."""
    needed = [
        each
        for each in map(Requirement, requires(SDK) or ())
        if each.marker is None or each.marker.evaluate({"extra": ""})
    ]
    return {"python": platform.python_version()} | {each.name: version(each.name) for each in needed}


def run(tests: Sequence[str]) -> tuple[int, str]:
    """The exit status of pytest and its last line."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "not full and not gpu"]
    # Another library may deprecate what a third one still uses: that is neither's fault here.
    command += ["-W", "default::DeprecationWarning", *tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = [line for line in process.stdout if sys.stdout.write(line)]
    return process.returncode, re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= \n"))


def tried(tests: Sequence[str]) -> dict[str, Any]:
    """A cell: what was run, on which code, with which versions, and what came of it."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    facts = {"commit": commit.strip(), "machine": f"{platform.system()} {platform.machine()}", "versions": installed()}
    status, summary = run(tests)
    return facts | {"tests": list(tests), "passed": status == 0, "summary": summary}


def page(cells: Mapping[str, Any]) -> str:
    """The table of all cells."""
    head = HEAD.format(shown=" | ".join(SHOWN), dashes="---|" * len(SHOWN))
    return head + "".join(row(name, cell) for name, cell in sorted(cells.items())) + TAIL


def row(name: str, cell: Mapping[str, Any]) -> str:
    """One cell. One that was not run has a reason, and neither commit nor versions."""
    versions = [cell.get("versions", {}).get(each, "") for each in SHOWN]
    outcome = (
        f"{'passed' if cell['passed'] else '**failed**'}: {cell['summary']}"
        if versions[0]
        else f"not run: {cell['because']}"
    )
    return f"| {' | '.join([f'`{name}`', cell['date'], cell.get('commit', '')[:8], *versions, outcome])} |\n"


def main(cell: str = "", *tests: str) -> int:
    """Add a cell if there is one, and write the page. Returns 1 if its tests failed."""
    facts = {"because": tests[1]} if tests[:1] == ("--because",) else tried(tests) if cell else {}
    cells = json.loads(RECORD.read_text(encoding="utf-8"))  # after the tests: another cell may have ended meanwhile
    if cell:
        cells[cell] = facts | {"date": datetime.date.today().isoformat()}
        RECORD.write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(cells), encoding="utf-8")
    return 0 if facts.get("passed", True) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
