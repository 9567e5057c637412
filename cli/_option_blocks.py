"""Options that several verbs have in common, declared once: a verb takes a whole block as one parameter."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from specdec.sdk.json_files import as_mapping

from ._engine_options import ChatOption, only_one
from ._output import Format, JsonOption, QuietOption
from ._session import Session

if TYPE_CHECKING:
    from specdec.core.config.engine_config import EngineConfig


def _no_more_than_cores(num_threads: int | None) -> int | None:
    """Further threads only wait, and thousands of them end the process."""
    cores = os.cpu_count() or 1
    if num_threads is not None and num_threads > cores:
        raise typer.BadParameter(f"{num_threads} threads on {cores} cores.")
    return num_threads


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options that say how networks run."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="auto: float32 on a CPU, else the checkpoint's own."),
    ] = "auto"
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Prompt and output; default: the model's own limit.")
    ] = None
    num_threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=_no_more_than_cores,
            help="CPU threads, at most one per core; default: the setting num_threads, by its rule.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(NetworkOptions):
    """Options that describe the engine."""

    engine_config: Annotated[
        list[str] | None,  # of which `only_one` may be there
        typer.Option(
            "--engine-config",
            "-ec",
            metavar="JSON",
            help='Further settings, which win over flags, for example \'{"quantization": "int8_weight_only"}\'.',
        ),
    ] = None

    def config(self, model: str, **defaults: Any) -> EngineConfig:
        """The settings of an engine; --engine-config wins over `defaults`. Raises ConfigError."""
        from specdec.core.config.engine_config import EngineConfig

        text = only_one("--engine-config", self.engine_config)
        further = as_mapping(text, "--engine-config", '{"block_size": 32}') if text is not None else {}
        flags = {each.name: getattr(self, each.name) for each in fields(NetworkOptions)}
        return EngineConfig(**{"model": model} | defaults | flags | further)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options that choose the prompts, and how each is continued."""

    num_prompts: Annotated[int, typer.Option(min=0, help="Taken in turn from each category; 0: all.")] = 6
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens per prompt, at most.")] = 128
    max_concurrency: Annotated[int, typer.Option(min=1, help="Requests that run at the same time.")] = 1
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt; each next one has one more.")] = 0
    category: Annotated[str | None, typer.Option(help="Only prompts of this category.")] = None
    chat: ChatOption = False

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of RunSettings."""
        names = ("num_prompts", "output_len", "temperature", "seed", "category", "chat")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Options that say how a run is timed and checked."""

    repeat: Annotated[int, typer.Option(min=1, help="Times each prompt is measured, beside its baseline.")] = 3
    warmup: Annotated[int, typer.Option(min=0, help="Prompts run before anything is measured.")] = 1
    check_equal: Annotated[
        Literal["greedy", "off"],
        typer.Option(help="greedy: exit code 1 if greedy outputs differ from plain decoding's."),
    ] = "greedy"
    profile: Annotated[bool, typer.Option("--profile", help="Also say where the time goes.")] = False

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of RunSettings."""
        return {"repeat": self.repeat, "warmup": self.warmup, "check_equal": self.check_equal}


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options that name the files of a result."""

    save_result: Annotated[Path | None, typer.Option(help="Write the result to this file, as JSON.")] = None
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page with plots; its figures lie beside it as JSON and CSV."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options that choose what is printed."""

    how: Annotated[
        Format,
        typer.Option("--format", help="human: for people; json: all of it; quiet: one line, or one for each row."),
    ] = "auto"
    as_json: JsonOption = False
    quiet: QuietOption = False

    def form(self, session: Session) -> tuple[Format, bool]:
        """The form of the result, and whether only the result and errors may be printed."""
        how: Format = "json" if self.as_json else self.how
        if self.quiet:
            logging.getLogger("specdec").setLevel(logging.ERROR)
        return how, self.quiet or session.quiet or how in ("json", "quiet")


Command = Callable[..., None]


def with_blocks(command: Command) -> Command:
    """The verb as typer sees it: each parameter that is a block of options stands there as the options of it."""
    hints = get_type_hints(command, include_extras=True)
    blocks: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        block = blocks.get(name)
        parameters += _options(block) if block else [parameter.replace(annotation=hints[name])]

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, block in blocks.items():
            values[name] = block(**{field.name: values.pop(field.name) for field in fields(block)})
        command(**values)

    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    expanded.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    return expanded


def _options(block: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(block, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(each.name, kind, default=each.default, annotation=hints[each.name]) for each in fields(block)
    ]
