"""`specdec compare`: several proposers, or one with several settings, on the same prompts."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ._engine_options import (
    DatasetPathOption,
    QuietOption,
    SpeculativeOption,
    dataset_settings,
    output_form,
    silence_libraries,
)
from ._option_blocks import (
    EngineOptions,
    MeasureOptions,
    PromptOptions,
    SaveOptions,
    is_recording,
    with_blocks,
)
from ._output import Format, JsonOption
from ._saving import refuse_unwritable, save, show
from ._session import Session

if TYPE_CHECKING:
    from specdec.lab.comparison import Variant

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
        typer.Argument(metavar="MODEL...", help="Targets, or recordings, on which nothing is timed; each by itself."),
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
    how: Annotated[
        Format, typer.Option("--format", help="human: tables; json: the result as one object; quiet: the best one.")
    ] = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare proposers: one baseline, the same prompts in turns, and intervals of the differences."""
    how, quiet = output_form(ctx, how, as_json, quiet)
    from specdec.lab.comparison import Sweep, variants

    chosen = variants(speculative_config or [], [Sweep.parse(text) for text in sweep or []])
    refuse_unwritable(saving)
    silence_libraries()
    if all(map(is_recording, model)):
        _refuse_for_recordings(ctx)
    told = {"tell_apart": tell_apart / 100}
    cells = [
        _recorded(ctx.obj, Path(each), chosen, sort, engine.device, {"repeat": measuring.repeat} | told, quiet=quiet)
        for each in model
        if is_recording(each)
    ]
    for each, named in product([each for each in model if not is_recording(each)], _datasets(dataset, dataset_path)):
        flags = {"max_num_seqs": prompts.max_concurrency, "enable_profiling": measuring.profile}
        settings = prompts.settings | measuring.settings | named | {"engine": flags | engine.settings(each)}
        cells.append(_measured(ctx.obj, settings, chosen, sort, told, quiet=quiet))
    result = {"schema_version": cells[0]["schema_version"], "kind": "compare", "cells": cells}
    not_saved = save(result, saving)
    from ._compare_view import one_line, show_comparison

    show(result, how, one_line, lambda: show_comparison(result, ctx.obj.console()))
    if not_saved:
        raise not_saved
    different = any(row["outputs_equal"] is False for cell in cells for row in cell["rows"])
    if different and prompts.temperature == 0:
        raise typer.Exit(EXIT_DIFFERENT)


FOR_RECORDINGS = {"model", "speculative_config", "sweep", "sort", "tell_apart", "repeat", "device", "quiet"}
FOR_RECORDINGS |= {"save_result", "report", "how", "as_json"}


def _refuse_for_recordings(ctx: typer.Context) -> None:
    """Raise BadParameter for options that say nothing to a recording, if they stand on the command line."""
    given = [
        each.opts[0]
        for each in ctx.command.params
        if each.name is not None and each.name not in FOR_RECORDINGS
        if str(getattr(ctx.get_parameter_source(each.name), "name", "")) == "COMMANDLINE"
    ]
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


def _measured(
    session: Session,
    settings: dict[str, Any],
    variants: list[Variant],
    sort: Sort,
    how: dict[str, Any],
    *,
    quiet: bool,
) -> dict[str, Any]:
    """The comparison on one target and one dataset."""
    from specdec.core.config.engine_config import EngineConfig
    from specdec.lab.comparison import run_compare
    from specdec.lab.run import RunSettings

    from ._progress import progress_on_stderr

    chosen = RunSettings(**settings | {"engine": EngineConfig(**settings["engine"])})
    by = "speedup" if sort == "auto" else sort
    with progress_on_stderr(session, quiet=quiet) as progress:
        return run_compare(chosen, variants, session.settings, progress, by, **how)


def _recorded(
    session: Session,
    folder: Path,
    variants: list[Variant],
    sort: Sort,
    device: str,
    how: dict[str, Any],
    *,
    quiet: bool,
) -> dict[str, Any]:
    """The comparison on a recording."""
    from specdec.lab.comparison import run_compare_recorded

    from ._progress import progress_on_stderr

    by = None if sort == "auto" else sort
    with progress_on_stderr(session, quiet=quiet) as progress:
        return run_compare_recorded(
            folder, variants, session.settings, progress, by, device="cpu" if device == "auto" else device, **how
        )
