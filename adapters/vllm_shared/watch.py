"""Follows the calls of one worker's proposer from a thread of its own, and names the line of one that hangs."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from specdec.core.host import registry
from specdec.sdk.errors import PluginId, message

PERIOD = 1.0
"""Seconds between two looks."""

LONGEST_WAIT = 5.0
"""Seconds for the last look to end."""

FRAMES = 12
"""The most that are shown of a stack, the deepest ones."""

logger = logging.getLogger("specdec")


@dataclass
class Call:
    """A call of the proposer that runs now."""

    method: str
    thread: int
    start: float
    told_from: float  # seconds: it is named when it has run for so long, and then each time it has run twice as long


class Watch:
    """Warns about a long call, once and then each time it has run twice as long: 30, 60, 120 seconds."""

    def __init__(self, plugin: PluginId, limit: float) -> None:
        """limit: seconds after which a call is named."""
        self._plugin, self._limit = plugin, limit
        self._call: Call | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specdec-watch", daemon=True)
        self._others: list[Callable[[], None]] = []

    @contextmanager
    def calling(self, method: str) -> Iterator[None]:
        """The proposer's method runs inside."""
        outer, call = self._call, Call(method, threading.get_ident(), time.monotonic(), self._limit)
        self._call = call
        try:
            yield
        finally:
            self._call = outer
            if call.told_from > self._limit:
                seconds = time.monotonic() - call.start
                logger.warning("%s of %s returned after %.1f seconds", method, self._plugin, seconds)

    @property
    def seconds(self) -> float:
        """How long the call that runs has been running; 0 if none does."""
        call = self._call
        return 0.0 if call is None else time.monotonic() - call.start

    def look(self) -> None:
        """Name the call that runs, if it has run for long enough."""
        call = self._call
        if call is None or (seconds := time.monotonic() - call.start) < call.told_from:
            return
        frame = sys._current_frames().get(call.thread)
        if frame is not None:
            call.told_from = 2 * seconds
            logger.warning("%s", self._said(call.method, seconds, frame))

    def each_time(self, other: Callable[[], None]) -> None:
        """Call this too after each look, in the same thread."""
        self._others.append(other)

    def start(self) -> None:
        """Look from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. What is under way ends first, unless it takes seconds."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LONGEST_WAIT)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD):
            self.look()
            for other in self._others:
                other()

    def _said(self, method: str, seconds: float, frame: FrameType) -> str:
        stack = [f"{each.filename}:{each.lineno} in {each.name}" for each in traceback.extract_stack(frame)]
        facts = {
            "where": registry.author_line_now(frame, self._plugin.target) or stack[-1],
            "stack": "\n".join(stack[-FRAMES:]),
            "effect": "every request of this engine waits; /health goes on answering 200",
            "next": "repair that line; if it never returns, end the server: a thread cannot be stopped from outside",
        }
        return message("SD-W216", f"{method} has not returned for {seconds:.0f} seconds", facts, self._plugin)
