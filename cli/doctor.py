"""`specdec doctor`: is this environment fit to run, and if not, what to do."""

from __future__ import annotations

from dataclasses import asdict

import typer

from ._output import FormatOption, JsonOption, show_rows
from ._session import Session

EXIT_ENVIRONMENT = 4


def command(ctx: typer.Context, how: FormatOption = "auto", as_json: JsonOption = False) -> None:
    """Check versions, the installation, devices and plugins. Exit code 4 if something is wrong."""
    from ._checks import examine

    session: Session = ctx.obj
    findings = examine(session.settings)
    show_rows(
        [asdict(finding) for finding in findings],
        ("subject", "status", "found", "fix"),
        "json" if as_json else how,
        session,
    )
    num_wrong = sum(finding.status == "wrong" for finding in findings)
    if num_wrong:
        typer.echo(f"{num_wrong} of {len(findings)} checks found something wrong", err=True)
        raise typer.Exit(EXIT_ENVIRONMENT)
