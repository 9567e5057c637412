"""The lab from Python: what the verbs `bench`, `compare` and `why` do, with results that notebooks show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.html import table
from specdec.core.registry import PluginSettings

from .comparison import Sweep, run_compare, run_compare_recorded, variants
from .progress import progress_for
from .report import write_report
from .report.content import content_of, figure_rows
from .run import BenchSettings, RunSettings, run_bench
from .why import run_why

Settings = str | Mapping[str, Any]
MOST_COLUMNS = 8


class Result(dict[str, Any]):
    """A result as the verbs write it to a file."""

    def report(self, path: str | Path) -> list[Path]:
        """Write the page with plots, and its figures beside it. Returns the files. Raises ConfigError SD-E255."""
        return write_report(self, Path(path))

    def _repr_html_(self) -> str:
        rows = [row for row in figure_rows(content_of(self)) if row["category"] == "all"]
        names = list(rows[0])[:MOST_COLUMNS]
        shown = [["" if row[name] is None else row[name] for name in names] for row in rows]
        return table(shown, [name.replace("_", " ") for name in names])


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
    speculative_configs: Sequence[Settings],
    *,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    sort: str = "speedup",
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Compare proposers on one target.

    sweep: values of keys of speculative_config, of which every combination is measured. settings: fields of
    EngineConfig and of RunSettings. sort: one of METRICS. quiet: no progress. Raises SpecdecError.
    """
    chosen = variants(speculative_configs, [Sweep(key, tuple(values)) for key, values in (sweep or {}).items()])
    own = {name: settings.pop(name) for name in RunSettings.model_fields if name in settings}
    run = RunSettings(engine=_engine(model, settings), **own)
    with progress_for(Console(), quiet=quiet) as progress:
        return Result(run_compare(run, chosen, PluginSettings(), progress, sort))


def compare_recorded(
    recording: str | Path, speculative_configs: Sequence[Settings], *, sort: str | None = None, quiet: bool = False
) -> Result:
    """Compare proposers on a recording. Arguments as of `compare`. Raises SpecdecError."""
    with progress_for(Console(), quiet=quiet) as progress:
        chosen = variants(speculative_configs, [])
        return Result(run_compare_recorded(Path(recording), chosen, PluginSettings(), progress, sort))


def why(recording: str | Path, speculative_configs: Sequence[Settings], *, quiet: bool = False) -> Result:
    """Explain rejections on a recording. Raises SpecdecError."""
    with progress_for(Console(), quiet=quiet) as progress:
        return Result(run_why(Path(recording), variants(speculative_configs, []), PluginSettings(), progress))


def _engine(model: str | Path, settings: Mapping[str, Any]) -> EngineConfig:
    """One request at a time unless something else is asked for, as the verbs do."""
    return EngineConfig(**{"model": model, "max_num_seqs": 1} | dict(settings))
