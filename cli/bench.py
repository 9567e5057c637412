"""`specdec bench`: what a proposer brings on a model, against plain decoding on the same machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ._engine_options import (
    DatasetOption,
    DatasetPathOption,
    ModelArgument,
    SpeculativeOption,
    dataset_settings,
    only_one,
    silence_libraries,
)
from ._option_blocks import EngineOptions, MeasureOptions, OutputOptions, PromptOptions, SaveOptions, with_blocks
from ._saving import deliver, refuse_unwritable
from ._session import Session

EXIT_DIFFERENT = 1


@with_blocks
def command(  # noqa: PLR0913 - one parameter per flag
    ctx: typer.Context,
    model: ModelArgument,
    speculative_config: SpeculativeOption = None,
    *,
    prompts: PromptOptions,
    dataset: DatasetOption = "packaged",
    dataset_path: DatasetPathOption = None,
    measuring: MeasureOptions,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="auto|off|FILE", help="auto: plain decoding, in turn; FILE: the saved result of a plain run."
        ),
    ] = "auto",
    saving: SaveOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> None:
    """Measure a proposer: acceptance, speed-up over plain decoding, and equality of the outputs."""
    session: Session = ctx.obj
    how, quiet = output.form(session)
    several = ["specdec", "compare", model, *(word for text in speculative_config or () for word in ("-sc", text))]
    asked = only_one("--speculative-config", speculative_config, shlex.join(several))
    config = engine.config(model, max_num_seqs=prompts.max_concurrency, enable_profiling=measuring.profile)
    named = dataset_settings(dataset, dataset_path)
    earlier = Path(baseline) if baseline not in ("auto", "off") else None
    refuse_unwritable(saving, named["dataset_path"], earlier)
    silence_libraries()
    from specdec.lab.run import BenchSettings, run_bench

    from ._bench_view import one_line, show_result

    settings = BenchSettings(
        engine=config,
        speculative_config=asked,
        baseline="auto" if baseline == "auto" else earlier or "off",
        **named,
        **prompts.settings,
        **measuring.settings,
    )
    with session.progress(quiet=quiet) as progress:
        result = run_bench(settings, session.settings, progress)
    deliver(result, saving, how, one_line, lambda: show_result(result, session.console()))
    if result["outputs_equal"] is False and prompts.temperature == 0:
        raise typer.Exit(EXIT_DIFFERENT)
