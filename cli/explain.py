"""`specdec explain`: what an error code means, why it matters and what to do; what a check of the kit checks."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.sdk import ConfigError
from specdec.sdk.errors import did_you_mean
from specdec.sdk.explanations import explanations

from ._engine_options import silence_libraries
from ._output import FormatOption, JsonOption, show_rows
from ._session import Session

if TYPE_CHECKING:
    from specdec.testing.checks import Check

PREFIX = "SD-"


def command(
    ctx: typer.Context,
    code: Annotated[
        str | None,
        typer.Argument(
            help="A code such as SD-E102, or E102 for short; or a check of specdec check; left out: list all codes."
        ),
    ] = None,
    how: FormatOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Explain an error or warning code: what it means, why it matters, and the fix, with an example. Or a check."""
    session: Session = ctx.obj
    how = "json" if as_json else how
    if code is None:
        rows = [asdict(each) for each in explanations().values()]
        fields = list(rows[0]) if how == "json" else ["code", "error", "title"]
        show_rows(rows, fields, how, session)
        return
    found = explanations().get(PREFIX + code.upper().removeprefix(PREFIX))
    if found is not None:
        facts, short, text = asdict(found), found.title, found.text
    else:
        check = _find_check(code)
        facts, short, text = {"check": check.name, "level": check.level, "rule": check.rule}, check.rule, check.text
    print(json.dumps(facts, indent=2) if how == "json" else short if how == "quiet" else text)


def _find_check(name: str) -> Check:
    silence_libraries()
    from specdec.testing.checks import ALL_CHECKS  # imported here: codes are explained without torch

    checks = {check.name: check for check in ALL_CHECKS}
    if name in checks:
        return checks[name]
    hint = did_you_mean(PREFIX + name.upper().removeprefix(PREFIX), explanations()) or did_you_mean(name, checks)
    facts = {"did you mean": hint, "all codes": "specdec explain", "all checks": ", ".join(checks)}
    raise ConfigError(
        "SD-E132", f"there is no code or check {name!r}", {key: text for key, text in facts.items() if text}
    )
