"""One page of what was found: stages, goals, figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .figures import GOALS

Record = Mapping[str, Any] | None


def page_of(records: Mapping[str, Record], *, smoke: bool) -> str:
    """In markdown. `records`: of each stage; None where it has not run."""
    lines = ["# The first hour on a device" if not smoke else "# A rehearsal on a CPU: no figure means anything", ""]
    lines += ["| goal | bound | found | met |", "|---|---|---|---|", *_goals(records), ""]
    lines += ["| stage | status | seconds |", "|---|---|---|", *_stages(records), ""]
    for name, record in records.items():
        if record and record["figures"]:
            lines += [f"## {name}", "", *(f"* {each}: {value}" for each, value in record["figures"].items()), ""]
    return "\n".join(lines)


def _goals(records: Mapping[str, Record]) -> Iterator[str]:
    found = {name: value for record in records.values() if record for name, value in record["figures"].items()}
    for name, goal in GOALS.items():
        value = found.get(name)
        judged = "not measured" if value is None else "yes" if goal.is_met_by(value) else "no"
        yield f"| {name} | {goal} | {'' if value is None else value} | {judged} |"


def _stages(records: Mapping[str, Record]) -> Iterator[str]:
    for name, record in records.items():
        if record is None:
            yield f"| {name} | left | |"
        else:
            because = f": {record['because'].replace('|', '/')}" if record["because"] else ""
            yield f"| {name} | {record['status']}{because} | {record['seconds']} |"
