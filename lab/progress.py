"""How far a run is: a bar on a terminal and in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from specdec.core.request.metrics import RequestMetrics

LINE_EVERY_S = 10.0


def counted(number: int, noun: str) -> str:
    """A number of things, as people say it."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class NoProgress:
    """Listens for the progress of a run and says nothing."""

    def stage(self, name: str, num_requests: int = 0) -> None:
        """Called when a stage begins that will finish this many requests. 0 means that they are not counted."""

    def finished(self, counts: RequestMetrics) -> None:
        """Called when a request of the stage ends, with what it counted of its drafts."""

    def written(self, num_bytes: int) -> None:
        """Called when a recording takes so much of the disk."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class BarProgress(NoProgress):
    """A bar with the time left and the acceptance length so far, gone when it is full.

    Stages that count nothing get a line: log messages may come in them, and would tear a bar.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._acceptance = RequestMetrics()
        self._bar: Progress | None = None

    def stage(self, name: str, num_requests: int = 0) -> None:
        """Begin a new bar, or say what begins."""
        self._end()
        if not num_requests:
            self._console.print(name, style="dim")
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[note]}")
        self._bar = Progress("{task.description}", *columns, console=self._console, transient=True)
        self._bar.add_task(name, total=num_requests, note="")
        self._bar.start()

    def finished(self, counts: RequestMetrics) -> None:
        """Advance the bar by one request."""
        self._acceptance.merge(counts)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], advance=1, note=_note(self._acceptance))

    def written(self, num_bytes: int) -> None:
        """Show it behind the bar."""
        if self._bar:
            self._bar.update(self._bar.task_ids[0], note=_size(num_bytes))

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._bar:
            self._bar.stop()
        self._bar = None


class LineProgress(NoProgress):
    """A line when a stage begins and at most every ten seconds after that."""

    def __init__(self) -> None:
        self._acceptance = RequestMetrics()
        self._name = ""
        self._total = self._done = 0
        self._seen = 0.0

    def stage(self, name: str, num_requests: int = 0) -> None:
        """Say that it begins."""
        self._name, self._total, self._done = name, num_requests, 0
        self._tell(f"{name}: {counted(num_requests, 'request')}" if num_requests else name)

    def finished(self, counts: RequestMetrics) -> None:
        """Count a request. Print a line if the last line is long enough ago."""
        self._done += 1
        self._acceptance.merge(counts)
        if time.monotonic() - self._seen >= LINE_EVERY_S:
            self._tell(f"{self._name}: {self._done}/{self._total}  {_note(self._acceptance)}".rstrip())

    def written(self, num_bytes: int) -> None:
        """Say it where the stage's last line is due."""
        if self._total and (time.monotonic() - self._seen >= LINE_EVERY_S or self._done == self._total):
            self._tell(f"{self._name}: {self._done}/{self._total}  {_size(num_bytes)}")

    def _tell(self, line: str) -> None:
        self._seen = time.monotonic()
        print(line, file=sys.stderr, flush=True)


def progress_for(console: Console, *, quiet: bool) -> NoProgress:
    """The kind that fits where `console` writes: standard error, or the output of a notebook's cell."""
    if quiet:
        return NoProgress()
    return BarProgress(console) if console.is_terminal or console.is_jupyter else LineProgress()


def _size(num_bytes: int) -> str:
    return f"{decimal(num_bytes)} on the disk" if num_bytes else "none of it on the disk yet"


def _note(acceptance: RequestMetrics) -> str:
    return f"acceptance length {acceptance.mean_acceptance_length:.2f}" if acceptance.num_drafts else ""
