"""The console script: the command in a child, which the parent believes only once it says that it is over."""

from __future__ import annotations

from specdec.testing.supervision import Notes, fork


def main() -> None:
    """Entry point of the console script and of `python -m specdec`. Forks before anything heavy is imported."""
    notes = Notes()
    fork(notes)
    with notes.until_over():
        from ._app import main as command
        from ._in_child import prepared

        with prepared(notes) as calls:
            command(calls)
