"""`specdec export`: how another engine runs the same target and proposer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from ._engine_options import ModelArgument, SpeculativeOption, only_one, silence_libraries
from ._output import JsonOption, QuietOption
from ._session import Session


def command(
    ctx: typer.Context,
    model: ModelArgument,
    engine: Annotated[
        Literal["vllm", "transformers"],
        typer.Option(help="vllm: a shell command; transformers: lines of Python."),
    ],
    speculative_config: SpeculativeOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Print what runs the same target and proposer in another engine. What does not survive is said on stderr."""
    session: Session = ctx.obj
    silence_libraries()
    from specdec.adapters.export import hand_over

    proposer = only_one("--speculative-config", speculative_config)
    answer = hand_over(engine, model, proposer, session.settings)
    print(json.dumps(asdict(answer), indent=2) if as_json else answer.text)
    for key, reason in answer.dropped.items():
        typer.echo(f"dropped  {key}: {reason}", err=True)
    if not (as_json or quiet or session.quiet):
        for note in answer.notes:
            typer.echo(f"note     {note}", err=True)
