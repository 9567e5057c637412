"""`specdec why`: what the target and the proposer thought of each rejected draft token, on a recording."""

from __future__ import annotations

import typer

from ._engine_options import (
    RecordedModelOption,
    RecordingArgument,
    ReplayDeviceOption,
    SpeculativeOption,
    silence_libraries,
)
from ._option_blocks import OutputOptions, SaveOptions, with_blocks
from ._saving import deliver, refuse_unwritable
from ._session import Session


@with_blocks
def command(
    ctx: typer.Context,
    recording: RecordingArgument,
    speculative_config: SpeculativeOption = None,
    *,
    model: RecordedModelOption = None,
    device: ReplayDeviceOption = "cpu",
    saving: SaveOptions,
    output: OutputOptions,
) -> None:
    """Explain rejections: ranks and probabilities, where drafts fail, and what a tree would have caught."""
    session: Session = ctx.obj
    how, quiet = output.form(session)
    from specdec.lab.comparison import variants

    chosen = variants(speculative_config or [], [])
    refuse_unwritable(saving)
    silence_libraries()
    from specdec.lab.why import run_why

    from ._why_view import one_line, show_why

    with session.progress(quiet=quiet) as progress:
        result = run_why(recording, chosen, session.settings, progress, model=model, device=device)
    deliver(result, saving, how, one_line, lambda: show_why(result, session.console()))
