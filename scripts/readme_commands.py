"""The commands that the README gives a newcomer, one a line. `python3 scripts/readme_commands.py` prints them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
SECTION = "## Two commands"
BLOCK = re.compile(r"^```bash\n(.+?)\n```$", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Those of the section, as they stand. Raises ValueError if they are not two of a line each."""
    section = text.partition(f"\n{SECTION}\n")[2].partition("\n## ")[0]
    found = BLOCK.findall(section)
    if len(found) != 2 or any("\n" in command for command in found):
        raise ValueError(f"expected two commands of one line below {SECTION!r}, found {found}")
    return found


if __name__ == "__main__":
    sys.stdout.write("".join(f"{command}\n" for command in commands(README.read_text(encoding="utf-8"))))
