"""`specdec export`: how another engine runs the same target and proposer."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from ._engine_options import ModelArgument, QuietOption, SpeculativeOption, only_one, output_form, silence_libraries
from ._output import Format, JsonOption
from ._session import Session


class Engine(StrEnum):
    """Where to go on."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


def command(
    ctx: typer.Context,
    model: ModelArgument,
    engine: Annotated[Engine, typer.Option(help="vllm: a shell command; transformers: lines of Python.")],
    speculative_config: SpeculativeOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Print what runs the same target and proposer in another engine. What does not survive is said on stderr."""
    _, quiet = output_form(ctx, Format.AUTO, as_json, quiet)
    silence_libraries()
    from specdec.adapters.export import hand_over

    session: Session = ctx.obj
    proposer = only_one("--speculative-config", speculative_config)
    answer = hand_over(engine.value, model, proposer, session.settings)
    print(json.dumps(asdict(answer), indent=2) if as_json else answer.text)
    for key, reason in answer.dropped.items():
        typer.echo(f"dropped  {key}: {reason}", err=True)
    if not quiet:
        for note in answer.notes:
            typer.echo(f"note     {note}", err=True)
