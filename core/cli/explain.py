"""`specdec explain`: what an error code means, why it matters and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from specdec.sdk import ConfigError
from specdec.sdk.errors import did_you_mean
from specdec.sdk.explanations import Explanation, explanations

from ._output import Format, FormatOption, JsonOption, show_rows
from ._session import Session

PREFIX = "SD-"


def command(
    ctx: typer.Context,
    code: Annotated[
        str | None, typer.Argument(help="A code such as SD-E102, or E102 for short; left out: list them all.")
    ] = None,
    how: FormatOption = Format.AUTO,
    as_json: JsonOption = False,
) -> None:
    """Explain an error or warning code: what it means, why it matters, and the fix, with an example."""
    session: Session = ctx.obj
    how = Format.JSON if as_json else how
    if code is None:
        rows = [asdict(each) for each in explanations().values()]
        fields = list(rows[0]) if how is Format.JSON else ["code", "error", "title"]
        show_rows(rows, fields, how, session)
        return
    found = _find(code)
    if how is Format.JSON:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(found.title if how is Format.QUIET else found.text)


def _find(code: str) -> Explanation:
    known = explanations()
    asked = PREFIX + code.upper().removeprefix(PREFIX)
    if asked in known:
        return known[asked]
    facts = {"did you mean": did_you_mean(asked, known), "all codes": "specdec explain"}
    raise ConfigError("SD-E132", f"there is no code {code!r}", {label: hint for label, hint in facts.items() if hint})
