"""Write the table "capability x engine" into the docs, from what tests on real engines recorded.

python -m scripts.engine_table              render docs/reference/engines.json again
python -m scripts.engine_table NEW.json     take the engines that NEW.json has from there first
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
RECORD = DOCS / "reference" / "engines.json"
PAGE = DOCS / "how-to" / "run-in-vllm.md"
BEGIN, END = "<!-- engines: written by scripts/engine_table.py -->\n", "<!-- end of engines -->\n"


def table(record: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row per capability, a column per engine. A cell says what was shown there; empty: nothing was."""
    capabilities = list(dict.fromkeys(name for shown in record.values() for name in shown))
    lines = ["| capability | " + " | ".join(record) + " |", "|---" * (len(record) + 1) + "|"]
    for name in capabilities:
        cells = [_cell(shown.get(name)) for shown in record.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(shown: dict[str, Any] | None) -> str:
    if shown is None:
        return ""
    calls = " + ".join(map(str, shown["propose_calls"]))
    return f"{shown['result']} ({calls} calls)" if calls else str(shown["result"])


def with_table(page: str, record: dict[str, dict[str, Any]]) -> str:
    """The page with the table between its marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(record) + END + after


def main(new: Path | None) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    if new is not None:
        record |= json.loads(new.read_text())
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), record))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
