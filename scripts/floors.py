"""The lowest versions that the package says it runs with, as pip's constraints: `python3 scripts/floors.py`.

python3 scripts/floors.py > floors.txt && pip install -c floors.txt '.[testing]'
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("lab", "quantization", "testing")
FLOOR = re.compile(r"(?P<name>[\w-]+)>=(?P<version>[\d.]+)(?P<where>\s*;.*)?")


def floors(project: str) -> Iterator[str]:
    """One of each requirement of the package and of what its users add. Raises ValueError for one without a floor."""
    tables = tomllib.loads(project)["project"]
    for text in dict.fromkeys(
        [*tables["dependencies"], *(r for e in EXTRAS for r in tables["optional-dependencies"][e])]
    ):
        found = FLOOR.fullmatch(text)
        if found is None:
            raise ValueError(f"expected NAME>=VERSION, found {text!r}")
        yield f"{found['name']}=={found['version']}{found['where'] or ''}"


if __name__ == "__main__":
    sys.stdout.write("".join(f"{each}\n" for each in floors(PROJECT.read_text(encoding="utf-8"))))
