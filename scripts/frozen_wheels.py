"""Build the plugins below tests/frozen/VERSION for good: python -m scripts.frozen_wheels VERSION [FOLDER]

They are what authors wrote for a version of the contract, and every later commit runs them. Build them before it is
published, and never again. FOLDER: where the wheels go. It is tests/frozen/VERSION if you leave it out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .clean_environment import build_wheel

FROZEN = Path(__file__).parents[1] / "tests" / "frozen"
BUILT_AT = "1795651200"  # 2026-11-26: equal sources give equal bytes


def build(version: str, out: Path) -> None:
    """One wheel of each project."""
    for project in sorted((FROZEN / version).glob("*/pyproject.toml")):
        build_wheel(project.parent, out, SOURCE_DATE_EPOCH=BUILT_AT)


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else FROZEN / sys.argv[1])
