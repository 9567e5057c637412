"""`specdec replay`: proposers on a recording, without its target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.sdk import ConfigError, SpecdecError

from ._engine_options import (
    RecordedModelOption,
    RecordingArgument,
    ReplayDeviceOption,
    SpeculativeOption,
    silence_libraries,
)
from ._option_blocks import OutputOptions, SaveOptions, with_blocks
from ._output import Format, show_rows
from ._saving import refuse_unwritable, save
from ._session import Session

if TYPE_CHECKING:
    from specdec.lab.replay.result import Replays

FIELDS = (
    "proposer",
    "num_speculative_tokens",
    "num_steps",
    "tokens_per_target_step",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "expected_tokens_per_step",
    "predicted_speedup",
    "seconds",
)


@with_blocks
def command(
    ctx: typer.Context,
    recording: RecordingArgument,
    speculative_config: SpeculativeOption = None,
    *,
    saving: SaveOptions,
    model: RecordedModelOption = None,
    device: ReplayDeviceOption = "cpu",
    watch: Annotated[bool, typer.Option("--watch", help="Run again whenever a file of the proposers changes.")] = False,
    output: OutputOptions,
) -> None:
    """Say what proposers would have drafted along a recording: steps and accepted tokens of a live run."""
    session: Session = ctx.obj
    how, _ = output.form(session)
    if not speculative_config:
        raise ConfigError("SD-E251", "nothing is to be replayed", {"fix": "name a proposer with -sc, or several"})
    if watch and (saving.save_result or saving.report):
        raise typer.BadParameter("--watch prints only: leave it out, or leave out --save-result and --report.")
    refuse_unwritable(saving)
    silence_libraries()
    from specdec.lab.recording import Recording
    from specdec.lab.replay.result import Replays
    from specdec.lab.replay.watch import Watch

    opened, configs = Recording.open_filled(recording), speculative_config

    def once() -> Replays:
        replays = Replays.of(opened, configs, session.settings, model=model, device=device)
        _show(replays.facts, how, session)
        return replays

    if not watch:
        _write(once(), configs, saving)
        return

    def targets() -> list[str]:
        return [each.target for each in once().found if each.target is not None]

    Watch(targets, on_error=lambda error: typer.echo(_text(error), err=True)).forever()


def _write(replays: Replays, configs: list[str], saving: SaveOptions) -> None:
    """Write a comparison of what was printed. Raises ConfigError SD-E187, and SD-E251 for drawn drafts."""
    if saving.save_result is None and saving.report is None:
        return
    from specdec.lab.comparison import variants
    from specdec.lab.comparison.recorded import compared_replays

    save(compared_replays(replays, variants(configs, [])), saving)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, SpecdecError) else f"{type(error).__name__}: {error}"


def _show(rows: list[dict[str, Any]], how: Format, session: Session) -> None:
    if how == "json":
        print(json.dumps(rows, indent=2))
        return
    shown = [{name: _short(row[name]) for name in FIELDS} for row in rows]
    show_rows(shown, FIELDS, how, session)


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return " .. ".join(f"{each:.2f}" for each in value)
    return f"{value:.3f}" if isinstance(value, float) else value
