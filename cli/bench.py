"""`specdec bench`: what a proposer brings on a model, against plain decoding on the same machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.sdk import ConfigError

from ._engine_options import (
    DatasetOption,
    DatasetPathOption,
    ModelArgument,
    QuietOption,
    SpeculativeOption,
    dataset_settings,
    output_form,
    silence_libraries,
)
from ._option_blocks import EngineOptions, MeasureOptions, PromptOptions, SaveOptions, with_blocks
from ._output import Format, JsonOption
from ._saving import refuse_unwritable, save, show
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
    how: Annotated[
        Format, typer.Option("--format", help="human: tables; json: the result as one object; quiet: one line.")
    ] = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure a proposer: acceptance, speed-up over plain decoding, and equality of the outputs."""
    how, quiet = output_form(ctx, how, as_json, quiet)
    settings = {
        "engine": {"max_num_seqs": prompts.max_concurrency, "enable_profiling": measuring.profile}
        | engine.settings(model),
        "speculative_config": _one_proposer(model, speculative_config),
        **dataset_settings(dataset, dataset_path),
        "baseline": baseline if baseline in ("auto", "off") else Path(baseline),
        **prompts.settings,
        **measuring.settings,
    }
    refuse_unwritable(saving)
    result = _measure(ctx.obj, settings, quiet=quiet)
    not_saved = save(result, saving)
    from ._bench_view import one_line, show_result

    show(result, how, one_line, lambda: show_result(result, ctx.obj.console()))
    if not_saved:
        raise not_saved
    if result["outputs_equal"] is False and prompts.temperature == 0:
        raise typer.Exit(EXIT_DIFFERENT)


def _one_proposer(model: str, given: Sequence[str] | None) -> str | None:
    """The proposer to measure, or None. Raises ConfigError SD-E186 for several, with the command that takes them."""
    if given and len(given) > 1:
        facts = {f"number {number}": text for number, text in enumerate(given, start=1)}
        words = ["specdec", "compare", model, *(word for text in given for word in ("-sc", text))]
        raise ConfigError(
            "SD-E186", f"--speculative-config is given {len(given)} times", facts | {"fix": shlex.join(words)}
        )
    return given[0] if given else None


def _measure(session: Session, settings: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    silence_libraries()
    from specdec.core.config.engine_config import EngineConfig
    from specdec.lab.run import BenchSettings, run_bench

    from ._progress import progress_on_stderr

    chosen = BenchSettings(**settings | {"engine": EngineConfig(**settings["engine"])})
    with progress_on_stderr(session, quiet=quiet) as progress:
        return run_bench(chosen, session.settings, progress)
