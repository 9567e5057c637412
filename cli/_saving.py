"""Results on standard output and in files."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from specdec.sdk import ConfigError

from ._option_blocks import SaveOptions
from ._output import Format


def deliver(
    result: dict[str, Any],
    saving: SaveOptions,
    how: Format,
    one_line: Callable[[Any], str],
    print_tables: Callable[[], None],
) -> None:
    """Write the files asked for and print the result, which is printed whether they could be written or not."""
    try:
        save(result, saving)
    finally:
        if how == "json":
            sys.stdout.write(_json_text(result))
        elif how == "quiet":
            print(one_line(result))
        else:
            print_tables()


def refuse_unwritable(saving: SaveOptions, *read: Path | None) -> None:
    """Raise, before anything runs, if a result or a report cannot be written, or would replace a file that is read."""
    for flag, path in (("--save-result", saving.save_result), ("--report", saving.report)):
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"{flag} takes a file in a directory that exists, found {path}")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise typer.BadParameter(f"{flag} takes a file that may be written, found {path}")
    written = [saving.save_result] if saving.save_result else []
    if saving.report is not None:
        written += _files_of(saving.report, saving.save_result)
        from specdec.lab.report import require_plotly

        require_plotly()
    kept = {path.resolve() for path in read if path is not None}
    for path in written:
        if path.resolve() in kept:
            raise typer.BadParameter(f"{path} is read by this run and would be replaced: write to another file.")


def _files_of(report: Path, result: Path | None) -> list[Path]:
    """The report's. Raises if one would take the place of another one, or of the result. Its JSON is the result."""
    from specdec.lab.report.page import files_of

    page, *beside = files_of(report)
    others = [each.resolve() for each in (page, *beside) if each.suffix != ".json"]
    if page in beside:
        raise typer.BadParameter(f"--report takes a page such as {report.with_suffix('.html')}, found {report}")
    if result is not None and result.resolve() in others:
        raise typer.BadParameter(f"--report {report} writes {result} itself: give --save-result another name.")
    return [page, *beside]


def save(result: dict[str, Any], saving: SaveOptions) -> None:
    """Write the files asked for. Raises ConfigError SD-E187."""
    from specdec.lab.report import write_report, write_whole

    try:
        if saving.save_result is not None:
            write_whole(saving.save_result, _json_text(result))
        if saving.report is not None:
            write_report(result, saving.report)
    except OSError as error:
        path = error.filename or saving.save_result or saving.report
        facts = {"because": error.strerror, "fix": "the result stands on standard output; --json has all of it"}
        raise ConfigError("SD-E187", f"cannot write to {str(path)!r}", facts) from error


def _json_text(result: dict[str, Any]) -> str:
    """Indented, with lists of numbers on one line."""
    indented = json.dumps(result, indent=2, ensure_ascii=False)
    return re.sub(r"\[\n[^\[\]{}\"]*\]", lambda found: " ".join(found[0].split()), indented) + "\n"
