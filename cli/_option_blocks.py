"""Options that several verbs have in common, declared once: a verb takes a whole block as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ._engine_options import (
    ChatOption,
    DeviceOption,
    DtypeOption,
    EngineOption,
    MaxModelLenOption,
    NumThreadsOption,
    engine_settings,
)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options that describe the engine."""

    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    max_model_len: MaxModelLenOption = None
    engine_config: EngineOption = None
    num_threads: NumThreadsOption = None

    def settings(self, model: str) -> dict[str, Any]:
        """Fields of EngineConfig. Raises ConfigError."""
        return engine_settings(model, self.device, self.dtype, self.max_model_len, self.num_threads, self.engine_config)


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


def is_recording(model: str) -> bool:
    """Whether a model that is named is a folder of `specdec record`."""
    return (Path(model) / "manifest.json").is_file()


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
