"""How far a run is, on standard error."""

from __future__ import annotations

from rich.console import Console

from specdec.lab.progress import NoProgress, progress_for

from ._session import Session


def progress_on_stderr(session: Session, *, quiet: bool) -> NoProgress:
    """The kind that fits standard error."""
    return progress_for(Console(stderr=True, no_color=True if not session.colour else None), quiet=quiet)
