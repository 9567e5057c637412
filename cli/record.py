"""`specdec record`: what a target generates on a dataset, kept for proposers that are tried later."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specdec.sdk.json_files import as_mapping

from ._engine_options import (
    DatasetOption,
    DatasetPathOption,
    ModelArgument,
    dataset_settings,
    given_beside,
    only_one,
    silence_libraries,
)
from ._option_blocks import EngineOptions, PromptOptions, with_blocks
from ._output import QuietOption
from ._session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.core.config.engine_config import EngineConfig
    from specdec.core.model.hidden_states import HiddenState
    from specdec.core.registry import PluginSettings
    from specdec.lab.recording.settings import RecordSettings
    from specdec.lab.recording.source import Source

GIB = 2**30
WITH_DATA = {"model", "output", "data", "hidden_states", "max_disk", "quiet"} | {
    each.name for each in fields(EngineOptions)
}
"""The parameters that mean something beside --from."""


ELSEWHERE = {"model", "tokenizer", "dtype", "device", "max_model_len", "max_num_seqs", "trust_remote_code"}
"""The engine's settings that mean something to the other engines."""


Inside = Literal["specdec", "transformers", "vllm"]
"""The engines that can run the target of a recording."""


def _source(inside: Inside) -> Callable[[RecordSettings, PluginSettings], Source]:
    """What is recorded."""
    if inside == "transformers":
        from specdec.lab.recording.in_transformers import TransformersSource

        return TransformersSource
    if inside == "vllm":
        from specdec.lab.recording.in_vllm import VLLMSource

        return VLLMSource
    from specdec.lab.recording.in_specdec import EngineSource

    return EngineSource


def _layers(text: str) -> tuple[HiddenState, ...]:
    """Read layers such as "2,4,final". Raises BadParameter."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if any(word != "final" and not word.isdecimal() for word in words):
        raise typer.BadParameter(f"layers are numbers and 'final', such as 2,4,final; found {text!r}")
    return tuple("final" if word == "final" else int(word) for word in words)


def _vllm_arguments(given: list[str] | None) -> dict[str, Any]:
    """Read one JSON object of arguments for vLLM. Raises ConfigError."""
    text = only_one("--vllm", given)
    return {} if text is None else dict(as_mapping(text, "--vllm", '{"tensor_parallel_size": 2}'))


def _refuse_unread(config: EngineConfig, inside: Inside) -> None:
    """Raise BadParameter for settings that another engine would not read."""
    unread = sorted(config.model_dump(exclude_defaults=True).keys() - ELSEWHERE)
    if inside != "specdec" and unread:
        own = "; --vllm has vLLM's own" if inside == "vllm" else ""
        raise typer.BadParameter(f"--engine {inside} reads none of {', '.join(unread)}: leave that out{own}.")


@dataclass(frozen=True, kw_only=True)
class RecordedPrompts(PromptOptions):
    """The options of a benchmark, but all prompts unless fewer are asked for."""

    num_prompts: Annotated[int, typer.Option(min=0, help="Taken in turn from each category; 0: all.")] = 0


@with_blocks
def command(  # noqa: PLR0913 - one parameter per flag
    ctx: typer.Context,
    model: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder; one that was cut short is gone on with.")],
    dataset: DatasetOption = "packaged",
    dataset_path: DatasetPathOption = None,
    *,
    prompts: RecordedPrompts,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_m: Annotated[int, typer.Option(min=1, help="Likeliest tokens whose probability is kept at each place.")] = 20,
    hidden_states: Annotated[
        str, typer.Option(metavar="2,4,final", help="Hidden states to keep, which heads need; none by default.")
    ] = "",
    full_logits: Annotated[bool, typer.Option("--full-logits", help="Keep every logit of every place.")] = False,
    max_disk: Annotated[float | None, typer.Option(min=0, metavar="GIB", help="Most GiB of the folder.")] = None,
    cost: Annotated[bool, typer.Option(help="Measure what a step costs, from which speed-ups are predicted.")] = True,
    inside: Annotated[
        Inside,
        typer.Option("--engine", help="Who generates; transformers and vllm: greedily; transformers: one by one."),
    ] = "specdec",
    vllm_args: Annotated[
        list[str] | None,
        typer.Option(
            "--vllm", metavar="JSON", help='Further arguments of vLLM\'s engine: {"tensor_parallel_size": 2}.'
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--from", help="Training data of speculators or SpecForge for MODEL, read instead of running it."),
    ] = None,
    engine: EngineOptions,
    quiet: QuietOption = False,
) -> None:
    """Record what a target generates, so that `specdec replay` tries proposers on it without the target."""
    if max_disk is not None and not isfinite(max_disk):
        raise typer.BadParameter(f"--max-disk takes a number of GiB, found {max_disk}; without it there is no limit.")
    session: Session = ctx.obj
    quiet = quiet or session.quiet
    most_bytes = None if max_disk is None else max(int(max_disk * GIB), 1)
    unread = given_beside(ctx, WITH_DATA) if data is not None else []
    if unread:
        raise typer.BadParameter(f"--from runs no target and has its texts already. Leave out {', '.join(unread)}.")
    if vllm_args and inside != "vllm":
        raise typer.BadParameter("--vllm has arguments for --engine vllm, which is not asked for.")
    config = engine.config(model, max_num_seqs=prompts.max_concurrency)
    _refuse_unread(config, inside)
    silence_libraries()
    from rich.filesize import decimal

    from specdec.lab.progress import counted
    from specdec.lab.recording.foreign import import_data
    from specdec.lab.recording.recorder import record
    from specdec.lab.recording.settings import RecordSettings

    if data is not None:
        manifest = import_data(data, engine.config(model), _layers(hidden_states), output, max_disk=most_bytes)
        if not quiet:
            print(f"{output}: recorded from {manifest.source}")
        return
    settings = RecordSettings(
        engine=config,
        **dataset_settings(dataset, dataset_path),
        **prompts.settings,
        top_p=top_p,
        top_k=top_k,
        top_m=top_m,
        hidden_states=_layers(hidden_states),
        full_logits=full_logits,
        max_disk=most_bytes,
        measure_cost=cost,
        vllm=_vllm_arguments(vllm_args),
    )
    with session.progress(quiet=quiet) as progress:
        written = record(settings, session.settings, output, progress, _source(inside))
    if not quiet:
        longest = f"max_model_len {written.manifest.target['max_model_len']} - {settings.output_len}"
        skipped = f"; {written.num_left_out} skipped: longer than {longest}" if written.num_left_out else ""
        print(f"{output}: {counted(len(written.done), 'request')}, {decimal(written.num_bytes)}{skipped}")
