"""`specdec evaluate-head`: what a trained head has learnt, and whether it is served as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specdec.sdk import ConfigError

from ._engine_options import QuietOption, SpeculativeOption, only_one, output_form, silence_libraries
from ._output import Format, JsonOption, show_rows


def command(
    ctx: typer.Context,
    train: Annotated[Path, typer.Argument(metavar="TRAINING", help="The recording that the head was trained on.")],
    held_out: Annotated[Path, typer.Argument(metavar="HELD_OUT", help="A recording of other prompts.")],
    speculative_config: SpeculativeOption = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The target's checkpoint, if it lies elsewhere than when recorded.")
    ] = None,
    live: Annotated[bool, typer.Option(help="Also run the target on the prompts of HELD_OUT.")] = True,
    how: Annotated[
        Format, typer.Option("--format", help="human: a table; json: an array; quiet: the first field only.")
    ] = Format.AUTO,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show how often a head agrees with its target, by depth: in training, on held-out data, and in the engine."""
    how, quiet = output_form(ctx, how, as_json, quiet)
    asked = only_one("--speculative-config", speculative_config)
    if asked is None:
        raise ConfigError("SD-E251", "no head is to be evaluated", {"fix": "name it with -sc"})
    silence_libraries()
    from specdec.lab.recording import Recording
    from specdec.lab.training.agreement import head_agreement

    opened = Recording.open(train), Recording.open(held_out)
    rows = head_agreement(*opened, asked, ctx.obj.settings, model=model, live=live)
    if how is Format.JSON:
        print(json.dumps([{"how": each.how, "data": each.data, "depths": each.depths} for each in rows], indent=2))
        return
    depths = range(max(len(each.depths) for each in rows))
    names = [f"depth {depth + 1}" for depth in depths]
    shown = [
        {"how": each.how, "data": each.data}
        | dict.fromkeys(names)
        | {name: f"{value:.3f}" for name, value in zip(names, each.depths, strict=False)}
        for each in rows
    ]
    show_rows(shown, ("how", "data", *names), how, ctx.obj)
