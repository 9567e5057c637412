"""Rows for people and for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from ._session import Session

Row = Mapping[str, Any]
STYLES = {"ok": "green", "note": "yellow", "duplicate": "yellow", "broken": "red", "wrong": "red", "blocked": "dim"}


Format = Literal["auto", "human", "json", "quiet"]
"""How rows are printed."""

FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="How to print: auto is a table on a terminal and tab-separated rows in a pipe; human is always a "
        "table; json is an array of objects; quiet is the first field only.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors and the result.")]


def show_rows(rows: Sequence[Row], fields: Sequence[str], how: Format, session: Session) -> None:
    """Print the chosen fields of every row on standard output."""
    chosen = [{field: row[field] for field in fields} for row in rows]
    if how == "json":
        print(json.dumps(chosen, indent=2, default=str))
    elif how == "quiet":
        print("\n".join(_text(row[fields[0]]) for row in chosen))
    elif how == "human" or sys.stdout.isatty():
        _show_table(chosen, fields, session)
    else:
        lines = (fields, *([_text(value) for value in row.values()] for row in chosen))
        print("\n".join("\t".join(line) for line in lines))


def _show_table(rows: Sequence[Row], fields: Sequence[str], session: Session) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for field in fields:
        table.add_column(field, overflow="fold")
    for row in rows:
        cells = [escape("" if value is None else str(value)) for value in row.values()]
        style = STYLES.get(str(row.get("status")), "")
        table.add_row(*cells, style=style if style != "green" else "")
    session.console().print(table)


def _text(value: object) -> str:
    """The value on one line, without tabs."""
    return "" if value is None else " ".join(str(value).split())
