"""`specdec compare`: several proposers, or one with several settings, on the same prompts."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ._engine_options import (
    DatasetPathOption,
    SpeculativeOption,
    dataset_settings,
    given_beside,
    silence_libraries,
)
from ._option_blocks import (
    EngineOptions,
    MeasureOptions,
    OutputOptions,
    PromptOptions,
    SaveOptions,
    with_blocks,
)
from ._saving import deliver, refuse_unwritable
from ._session import Session

EXIT_DIFFERENT = 1


Sort = Literal[
    "auto",
    "speedup",
    "tokens_per_second",
    "tokens_per_target_step",
    "mean_acceptance_length",
    "draft_acceptance_rate",
]
"""What the table is sorted by."""


@with_blocks
def command(  # noqa: PLR0913 - one parameter per flag
    ctx: typer.Context,
    model: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Targets, or recordings, whose times are predicted; each by itself."),
    ],
    speculative_config: SpeculativeOption = None,
    *,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="Each proposer with each value: num_speculative_tokens=1..8, OPTION=A,B or proposer_config.OPTION=A,B "
            "for the proposer's own. Repeated: every combination.",
        ),
    ] = None,
    sort: Annotated[
        Sort, typer.Option(help="The figure that decides the order. auto: speedup, without times tokens per step.")
    ] = "auto",
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            "--dataset-name",
            metavar="NAME[=FILE]",
            help="A prompt set as `bench` takes it; repeated, each by itself.",
        ),
    ] = None,
    dataset_path: DatasetPathOption = None,
    tell_apart: Annotated[
        float,
        typer.Option(min=0.1, max=100, metavar="PERCENT", help="Say how many prompts tell such a difference."),
    ] = 5.0,
    prompts: PromptOptions,
    measuring: MeasureOptions,
    saving: SaveOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Compare proposers: one baseline, the same prompts in turns, and intervals of the differences."""
    session: Session = ctx.obj
    how, quiet = output.form(session)
    from specdec.lab.comparison import Sweep, run_compare, run_compare_recorded, variants

    chosen = variants(speculative_config or [], [Sweep.parse(text) for text in sweep or []])
    datasets = _datasets(dataset, dataset_path)
    refuse_unwritable(saving, *(each["dataset_path"] for each in datasets))
    silence_libraries()
    from specdec.core.model.model_support import locate_model
    from specdec.lab.comparison.recorded import refuse_untimed
    from specdec.lab.recording import Recording
    from specdec.lab.result import SCHEMA_VERSION
    from specdec.lab.run import RunSettings

    from ._compare_view import one_line, show_comparison

    recordings = [each for each in model if _is_recording(each)]
    if len(recordings) == len(model):
        _refuse_for_recordings(ctx)
    by = None if sort == "auto" else sort
    for each in recordings:
        refuse_untimed(Recording.open_filled(each), by)
    asked: dict[str, Any] = {"variants": chosen, "plugins": session.settings, "tell_apart": tell_apart / 100}
    device = "cpu" if engine.device == "auto" else engine.device
    replayed = partial(run_compare_recorded, **asked, sort=by, device=device, repeat=measuring.repeat)
    runs = [partial(replayed, Path(each)) for each in recordings]
    models = [each for each in model if each not in recordings]
    read: dict[int, Any] = {}  # rows by data set, each read once: it may be a pipe
    for each, (place, named) in product(models, enumerate(datasets)):
        config = engine.config(each, max_num_seqs=prompts.max_concurrency, enable_profiling=measuring.profile)
        settings = RunSettings(engine=config, **prompts.settings, **measuring.settings, **named)
        locate_model(config.model)
        read[place] = read.get(place) or settings.rows(session.settings)
        runs.append(partial(run_compare, settings, **asked, sort=by or "speedup", rows=read[place]))
    cells: list[dict[str, Any]] = []
    result: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": "compare", "cells": cells}
    try:
        for run in runs:
            with session.progress(quiet=quiet) as progress:
                cells.append(run(progress=progress))
    finally:  # where a later one fails or is interrupted, too
        if cells:
            deliver(result, saving, how, one_line, lambda: show_comparison(result, session.console()))
    different = any(row["outputs_equal"] is False for cell in cells for row in cell["rows"])
    if different and prompts.temperature == 0:
        raise typer.Exit(EXIT_DIFFERENT)


def _is_recording(model: str) -> bool:
    """Whether a model that is named is a folder of `specdec record`."""
    return (Path(model) / "manifest.json").is_file()


FOR_RECORDINGS = {"model", "speculative_config", "sweep", "sort", "tell_apart", "repeat", "device", "quiet"}
FOR_RECORDINGS |= {"save_result", "report", "how", "as_json"}


def _refuse_for_recordings(ctx: typer.Context) -> None:
    """Raise BadParameter for options that say nothing to a recording, if they stand on the command line."""
    given = given_beside(ctx, FOR_RECORDINGS)
    if given:
        raise typer.BadParameter(
            f"A recording has its prompts, its target and its sampling already. Leave out {', '.join(given)}, "
            "or name a model."
        )


def _datasets(given: list[str] | None, path: Path | None) -> list[dict[str, Any]]:
    """Read each dataset as fields of RunSettings."""
    if path is not None and len(given or []) > 1:
        raise typer.BadParameter("--dataset-path is for one --dataset; of several, each is NAME=FILE.")
    return [dataset_settings(text, path) for text in given or ["packaged"]]
