"""`specdec bench`: what a proposer brings on a model, against plain decoding on the same machine."""

from __future__ import annotations

import json
import os
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.sdk import ConfigError

from ._engine_options import (
    DATASET_HELP,
    DATASETS,
    ChatOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    EngineOption,
    MaxModelLenOption,
    ModelArgument,
    NumThreadsOption,
    QuietOption,
    SpeculativeOption,
    engine_settings,
    only_one,
    output_form,
    silence_libraries,
)
from ._output import Format, JsonOption
from ._session import Session

EXIT_DIFFERENT = 1


class CheckEqual(StrEnum):
    """Whether outputs are compared with plain decoding's."""

    GREEDY = "greedy"
    OFF = "off"


def command(  # noqa: PLR0913 - one parameter per flag
    ctx: typer.Context,
    model: ModelArgument,
    speculative_config: SpeculativeOption = None,
    num_prompts: Annotated[int, typer.Option(min=0, help="Taken in turn from each category; 0: all.")] = 6,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens per prompt, at most.")] = 128,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests that run at the same time.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt; each next one has one more.")] = 0,
    dataset_name: Annotated[
        str,
        typer.Option(
            metavar=DATASETS,
            help=DATASET_HELP,
        ),
    ] = "packaged",
    dataset_path: Annotated[Path | None, typer.Option(help="The file of the dataset, or of the plugin.")] = None,
    category: Annotated[str | None, typer.Option(help="Only prompts of this category.")] = None,
    chat: ChatOption = False,
    repeat: Annotated[int, typer.Option(min=1, help="Times each prompt is measured, beside its baseline.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Prompts run before anything is measured.")] = 1,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="auto|off|FILE", help="auto: plain decoding, in turn; FILE: the saved result of a plain run."
        ),
    ] = "auto",
    check_equal: Annotated[
        CheckEqual, typer.Option(help="greedy: exit code 1 if greedy outputs differ from plain decoding's.")
    ] = CheckEqual.GREEDY,
    save_result: Annotated[Path | None, typer.Option(help="Write the result to this file, as JSON.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also say where the time goes.")] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.AUTO,
    max_model_len: MaxModelLenOption = None,
    engine_config: EngineOption = None,
    num_threads: NumThreadsOption = None,
    how: Annotated[
        Format, typer.Option("--format", help="human: tables; json: the result as one object; quiet: one line.")
    ] = Format.AUTO,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure a proposer: acceptance, speed-up over plain decoding, and equality of the outputs."""
    how, quiet = output_form(ctx, how, as_json, quiet)
    engine = engine_settings(model, device, dtype, max_model_len, num_threads, engine_config)
    engine = {"max_num_seqs": max_concurrency, "enable_profiling": profile} | engine
    settings = {
        "speculative_config": only_one("--speculative-config", speculative_config),
        "num_prompts": num_prompts,
        "output_len": output_len,
        "temperature": temperature,
        "seed": seed,
        "dataset_name": dataset_name,
        "dataset_path": dataset_path,
        "category": category,
        "chat": chat,
        "repeat": repeat,
        "warmup": warmup,
        "baseline": baseline if baseline in ("auto", "off") else Path(baseline),
        "check_equal": check_equal.value,
    }
    if save_result is not None:
        _refuse_unwritable(save_result)
    result = _measure(ctx.obj, engine, settings, quiet=quiet)
    not_saved = _save(result, save_result) if save_result is not None else None
    _show(result, ctx.obj, how)
    if not_saved:
        raise not_saved
    if result["outputs_equal"] is False and temperature == 0:
        raise typer.Exit(EXIT_DIFFERENT)


def _measure(session: Session, engine: dict[str, Any], settings: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    silence_libraries()
    from rich.console import Console

    from specdec.core.config.engine_config import EngineConfig
    from specdec.lab.run import BenchSettings, run_bench

    from ._bench_progress import progress_for

    chosen = BenchSettings(engine=EngineConfig(**engine), **settings)
    console = Console(stderr=True, no_color=True if not session.colour else None)
    with progress_for(console, quiet=quiet) as progress:
        return run_bench(chosen, session.settings, progress)


def _show(result: dict[str, Any], session: Session, how: Format) -> None:
    from ._bench_view import one_line, show_result

    if how is Format.JSON:
        sys.stdout.write(_json_text(result))
    elif how is Format.QUIET:
        print(one_line(result))
    else:
        show_result(result, session.console())


def _refuse_unwritable(path: Path) -> None:
    """Before a run, not after it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"--save-result takes a file in a directory that exists, found {path}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"--save-result takes a file that may be written, found {path}")


def _save(result: dict[str, Any], path: Path) -> ConfigError | None:
    """Write the file. Returns SD-E187 if that fails, for after the result is shown: a run is not lost by it."""
    try:
        path.write_text(_json_text(result), encoding="utf-8")
    except OSError as error:
        facts = {"because": error.strerror, "fix": "the result stands on standard output; --json has all of it"}
        return ConfigError("SD-E187", f"cannot write to {str(path)!r}", facts)
    return None


def _json_text(result: dict[str, Any]) -> str:
    """Indented, with lists of numbers on one line."""
    indented = json.dumps(result, indent=2, ensure_ascii=False)
    return re.sub(r"\[\n[^\[\]{}\"]*\]", lambda found: " ".join(found[0].split()), indented) + "\n"
