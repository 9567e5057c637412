"""`specdec why`: what the target and the proposer thought of each rejected draft token, on a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._engine_options import QuietOption, SpeculativeOption, output_form, silence_libraries
from ._option_blocks import SaveOptions, with_blocks
from ._output import Format, JsonOption
from ._saving import refuse_unwritable, save, show


@with_blocks
def command(
    ctx: typer.Context,
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="A folder that `specdec record` has written.")],
    speculative_config: SpeculativeOption = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", help="The target's checkpoint, if it lies elsewhere than when recorded.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where draft networks run: cpu, cuda or cuda:N.")] = "cpu",
    saving: SaveOptions,
    how: Annotated[
        Format, typer.Option("--format", help="human: tables; json: the result as one object; quiet: one line.")
    ] = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Explain rejections: ranks and probabilities, where drafts fail, and what a tree would have caught."""
    how, quiet = output_form(ctx, how, as_json, quiet)
    from specdec.lab.comparison import variants

    chosen = variants(speculative_config or [], [])
    refuse_unwritable(saving)
    silence_libraries()
    from specdec.lab.why import run_why

    from ._progress import progress_on_stderr
    from ._why_view import one_line, show_why

    with progress_on_stderr(ctx.obj, quiet=quiet) as progress:
        result = run_why(recording, chosen, ctx.obj.settings, progress, model=model, device=device)
    not_saved = save(result, saving)
    show(result, how, one_line, lambda: show_why(result, ctx.obj.console()))
    if not_saved:
        raise not_saved
