"""The lab from Python: what the verbs `bench`, `compare` and `why` do, with results that notebooks show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.core.config.engine_config import EngineConfig
from specdec.core.registry import PluginSettings

from .comparison import Sweep, run_compare, run_compare_recorded, variants
from .comparison.recorded import REPEAT
from .comparison.variants import Variant
from .progress import progress_for
from .report import write_report
from .report.content import content_of, figure_rows
from .result import signed
from .run import BenchSettings, RunSettings, run_bench
from .why import run_why

Settings = str | Mapping[str, Any]
Configs = Settings | Sequence[Settings]


class Result(dict[str, Any]):
    """A result as the verbs write it to a file."""

    def report(self, path: str | Path) -> list[Path]:
        """Write the page with plots, and its figures beside it. Returns the files. Raises ConfigError SD-E255."""
        return write_report(self, Path(path))

    def _repr_html_(self) -> str:
        rows = [row for row in figure_rows(content_of(self)) if row["category"] == "all"]
        heads = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
        by = self["configuration"].get("sort", "speedup")
        shown = [[_shown(name, row, by) for name in heads] for row in rows]
        return _table(shown, [COLUMNS[name] for name in heads])


COLUMNS = {
    "proposer": "Proposer",
    "speedup": "Speed-up (95 % interval)",
    "difference_to_best": "To the best (95 % interval)",
    "tokens_per_second": "Tokens per second",
    "tokens_per_target_step": "Tokens per target step",
    "mean_acceptance_length": "Acceptance length",
    "draft_acceptance_rate": "Drafts accepted",
}
"""What a notebook shows of a run, and how it is called there."""


def _table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    heads = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _shown(name: str, row: Mapping[str, Any], by: str) -> str:
    """A figure with its unit, and its interval where there is one. by: what the differences are of."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if name == "difference_to_best" and not value:
        return "best"
    form = {"speedup": "{:.2f}x", "draft_acceptance_rate": "{:.1%}", "tokens_per_second": "{:.1f}"}.get(name, "{:.2f}")
    numbers = [value] if low is None or high is None else [value, low, high]
    texts = signed(by, *numbers) if name == "difference_to_best" else [form.format(each) for each in numbers]
    return texts[0] + (f" ({' to '.join(texts[1:])})" if texts[1:] else "")


def bench(
    model: str | Path, speculative_config: Settings | None = None, *, quiet: bool = False, **settings: Any
) -> Result:
    """Measure one proposer against plain decoding.

    settings: fields of EngineConfig and of BenchSettings. quiet: no progress. Raises SpecdecError.
    """
    own = {name: settings.pop(name) for name in BenchSettings.model_fields if name in settings}
    chosen = BenchSettings(engine=_engine(model, settings), speculative_config=speculative_config, **own)
    with progress_for(Console(), quiet=quiet) as progress:
        return Result(run_bench(chosen, PluginSettings(), progress))


def compare(
    model: str | Path,
    speculative_configs: Configs,
    *,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    sort: str = "speedup",
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Compare proposers on one target.

    speculative_configs: one or several. sweep: values of keys of speculative_config, of which every combination is
    measured. settings: fields of EngineConfig and of RunSettings. sort: "speedup", "tokens_per_second",
    "tokens_per_target_step", "mean_acceptance_length" or "draft_acceptance_rate". quiet: no progress. Raises
    SpecdecError.
    """
    chosen = _variants(speculative_configs, sweep)
    own = {name: settings.pop(name) for name in RunSettings.model_fields if name in settings}
    run = RunSettings(engine=_engine(model, settings), **own)
    with progress_for(Console(), quiet=quiet) as progress:
        return Result(run_compare(run, chosen, PluginSettings(), progress, sort))


def compare_recorded(
    recording: str | Path,
    speculative_configs: Configs,
    *,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    sort: str | None = None,
    quiet: bool = False,
    model: str | Path | None = None,
    device: str = "cpu",
    repeat: int = REPEAT,
) -> Result:
    """Compare proposers on a recording: no target runs, and times are predicted.

    model: the target's checkpoint. None means that it lies where it was recorded. device: where draft networks run.
    repeat: how often each proposer is replayed. sort: None means the speed-up, or without times the tokens per step.
    Other arguments as of `compare`. Raises SpecdecError.
    """
    chosen = _variants(speculative_configs, sweep)
    with progress_for(Console(), quiet=quiet) as progress:
        return Result(
            run_compare_recorded(
                Path(recording), chosen, PluginSettings(), progress, sort, model=model, device=device, repeat=repeat
            )
        )


def why(
    recording: str | Path,
    speculative_configs: Configs,
    *,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    quiet: bool = False,
    model: str | Path | None = None,
    device: str = "cpu",
) -> Result:
    """Explain rejections on a recording. Arguments as of `compare_recorded`. Raises SpecdecError."""
    chosen = _variants(speculative_configs, sweep)
    with progress_for(Console(), quiet=quiet) as progress:
        return Result(run_why(Path(recording), chosen, PluginSettings(), progress, model=model, device=device))


def _variants(asked: Configs, sweep: Mapping[str, Sequence[Any]] | None) -> list[Variant]:
    """Read the variants that were asked for. A single proposer needs no list."""
    several = [asked] if isinstance(asked, str | Mapping) else asked
    return variants(several, [Sweep(key, tuple(values)) for key, values in (sweep or {}).items()])


def _engine(model: str | Path, settings: Mapping[str, Any]) -> EngineConfig:
    """The engine's settings. As in the commands, one request runs at a time unless the user asks for more."""
    return EngineConfig(**{"model": model, "max_num_seqs": 1} | dict(settings))
