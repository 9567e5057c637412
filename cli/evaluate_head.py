"""`specdec evaluate-head`: what a trained head has learnt, and whether it is served as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.sdk import ConfigError

from ._engine_options import RecordedModelOption, SpeculativeOption, only_one, silence_libraries
from ._option_blocks import OutputOptions, with_blocks
from ._output import show_rows

if TYPE_CHECKING:
    from specdec.lab.training.agreement import Agreement


@with_blocks
def command(
    ctx: typer.Context,
    train: Annotated[Path, typer.Argument(metavar="TRAINING", help="The recording that the head was trained on.")],
    held_out: Annotated[Path, typer.Argument(metavar="HELD_OUT", help="A recording of other prompts.")],
    speculative_config: SpeculativeOption = None,
    model: RecordedModelOption = None,
    live: Annotated[bool, typer.Option(help="Also run the target on the prompts of HELD_OUT.")] = True,
    *,
    output: OutputOptions,
) -> None:
    """Show how often a head agrees with its target, by depth: in training, on held-out data, and in the engine."""
    how, _ = output.form(ctx.obj)
    asked = only_one("--speculative-config", speculative_config)
    if asked is None:
        raise ConfigError("SD-E251", "no head is to be evaluated", {"fix": "name it with -sc"})
    silence_libraries()
    from specdec.lab.recording import Recording
    from specdec.lab.training.agreement import head_agreement

    opened = Recording.open_filled(train), Recording.open_filled(held_out)
    rows = head_agreement(*opened, asked, ctx.obj.settings, model=model, live=live)
    if how == "json":
        names = ("how", "data", "depths", "counts", "intervals")
        print(json.dumps([{name: getattr(each, name) for name in names} for each in rows], indent=2))
        return
    depths = range(max(len(each.depths) for each in rows))
    columns = [f"depth {depth + 1}" for depth in depths]
    shown = [
        {"how": each.how, "data": each.data} | dict.fromkeys(columns) | dict(zip(columns, _shown(each), strict=False))
        for each in rows
    ]
    show_rows(shown, ("how", "data", *columns), how, ctx.obj)


def _shown(row: Agreement) -> list[str]:
    """The share at each depth; where drafts were counted, its interval and their number."""
    if row.counts is None or row.intervals is None:
        return [f"{share:.3f}" for share in row.depths]
    columns = zip(row.depths, row.intervals, row.counts, strict=True)
    return [f"{share:.3f} ({low:.3f}-{high:.3f}) of {tried}" for share, (low, high), (_, tried) in columns]
