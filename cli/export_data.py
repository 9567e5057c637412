"""`specdec export-data`: a recording as training data for heads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ._engine_options import RecordingArgument, silence_libraries
from ._output import QuietOption


def command(
    ctx: typer.Context,
    recording: RecordingArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder.")],
    trainer: Annotated[
        Literal["speculators", "specforge"], typer.Option("--format", help="Whose trainer reads it.")
    ] = "speculators",
    layers: Annotated[
        str, typer.Option(metavar="2,4,5", help="What the head reads; every recorded layer but the target's last.")
    ] = "",
    drafter: Annotated[
        Literal["eagle3", "dflash", "dspark"], typer.Option(help="specforge: what is trained.")
    ] = "eagle3",
    compress: Annotated[bool, typer.Option("--compress", help="specforge: gzip each file.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Write a recording as training data, as the trainers of speculators or SpecForge read it."""
    words = [word.strip() for word in layers.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise typer.BadParameter(f"layers are numbers, such as 2,4,5; found {layers!r}")
    silence_libraries()
    from specdec.lab.progress import counted
    from specdec.lab.recording import Recording
    from specdec.lab.training.data import export_data

    chosen = tuple(map(int, words))
    done = export_data(Recording.open(recording), output, trainer, layers=chosen, drafter=drafter, compress=compress)
    if not (quiet or ctx.obj.quiet):
        states = f"hidden states {', '.join(map(str, done.layers))}" if done.layers else "no hidden states"
        print(f"{output}: {counted(done.num_rows, 'text')}, {states}")
