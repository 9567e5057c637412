"""`specdec list`: what is installed, read from metadata. No plugin is imported."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, get_args

import typer

from specdec.core.registry.discovery import Kind, discover
from specdec.sdk.errors import did_you_mean

from ._output import FormatOption, JsonOption, show_rows
from ._session import Session

FIELDS = ("name", "kind", "status", "distribution", "version", "target", "code", "reason")
DEFAULT_FIELDS = "name,kind,status,distribution,version,target,reason"


def command(
    ctx: typer.Context,
    kind: Annotated[Kind | None, typer.Option(help="List only these; by default all.")] = None,
    fields: Annotated[
        str, typer.Option(help=f"Print these columns, in this order, out of {', '.join(FIELDS)}.")
    ] = DEFAULT_FIELDS,
    show_all: Annotated[
        bool, typer.Option("--all", help="List blocked ones too; broken and duplicate ones always are.")
    ] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Import each in a process of its own (20 s at most) and report failures.")
    ] = False,
    how: FormatOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """List what is installed: proposers, hook plugins, and functions that are offered by name. Nothing is imported."""
    session: Session = ctx.obj
    chosen = _checked_fields(fields)
    how = "json" if as_json else how
    kinds = [kind] if kind else get_args(Kind)
    entries = [row for each in kinds for row in discover(each, session.settings)]
    blocked = [row for row in entries if row.status == "blocked"]
    shown = entries if show_all else [row for row in entries if row.status != "blocked"]
    if probe:
        from ._probe import probe as probed

        shown = list(map(probed, shown))
    if shown or how == "json":
        show_rows([asdict(row) for row in shown], chosen, how, session)
    if blocked and not show_all and how in ("auto", "human"):
        names = ", ".join(row.label for row in blocked)
        typer.echo(f"{len(blocked)} blocked, shown by --all: {names}", err=True)


def _checked_fields(fields: str) -> list[str]:
    chosen = [field.strip() for field in fields.split(",") if field.strip()]
    for field in chosen:
        if field not in FIELDS:
            hint = did_you_mean(field, FIELDS)
            meant = f" Did you mean {hint!r}?" if hint else ""
            raise typer.BadParameter(f"there is no field {field!r}.{meant} Fields: {', '.join(FIELDS)}.")
    if not chosen:
        raise typer.BadParameter(f"--fields names none of {', '.join(FIELDS)}.")
    return chosen
