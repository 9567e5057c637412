"""Which call of a plugin runs now, as the engine announces it by `sys.audit`. Imports no torch."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, Self

from specdec.sdk.errors import PluginId, message

logger = logging.getLogger("specdec")

BEGINS, ENDS = "specdec.call", "specdec.call_ended"
WATCH_S = 30.0
MOST_BETWEEN_S = 1.0  # looks of a watch
SAME_S = 0.25
"""A terminal interrupts parent and child, and the parent passes it on: interrupts so close together are one."""


@dataclass(frozen=True)
class Call:
    """One call of a plugin's code."""

    plugin: PluginId
    doing: str  # "propose", "importing the proposer"
    thread: int
    started: float  # time.monotonic()

    def __str__(self) -> str:
        target = f" ({self.plugin.target})" if self.plugin.distribution else ""
        return f"{self.doing} of {self.plugin}{target}"

    def place(self, frame: FrameType | None = None) -> str:
        """The author's "file:line in function" where it stands now. `frame`: of its thread, if it is known."""
        from specdec.core.host import registry

        frame = frame or sys._current_frames().get(self.thread)
        return registry.author_line_now(frame, self.plugin.target) or "unknown"


Listener = Callable[[Call | None, Call], None]


class Calls:
    """The calls that run, by thread; the innermost counts."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._running: dict[int, list[Call]] = {}

    def tell(self, listener: Listener) -> None:
        """Call it with what runs now in its thread, and with what began or ended last."""
        self._listeners.append(listener)

    def listen(self) -> None:
        """Listen from now on until the process ends: Python never forgets a listener."""
        sys.addaudithook(self._heard)

    @property
    def now(self) -> list[Call]:
        """The innermost call of each thread that is in one."""
        return [calls[-1] for calls in list(self._running.values()) if calls]

    def here(self) -> Call | None:
        """The innermost call of this thread."""
        calls = self._running.get(threading.get_ident())
        return calls[-1] if calls else None

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == BEGINS:
            plugin, doing = arguments
            call = Call(plugin, doing, threading.get_ident(), time.monotonic())
            self._running.setdefault(call.thread, []).append(call)
            self._tell_all(call, call)
        elif event == ENDS and (calls := self._running.get(threading.get_ident())):
            last = calls.pop()
            self._tell_all(calls[-1] if calls else None, last)

    def _tell_all(self, now: Call | None, last: Call) -> None:
        for listener in self._listeners:
            listener(now, last)


class Watch:
    """One warning for each kind of call that has not ended after `seconds`, with the line where it stands.

        with Watch(seconds=30):
            llm.generate(prompts)

    calls: those to watch. None means all of this process from now on, to its end.
    """

    def __init__(self, seconds: float = WATCH_S, calls: Calls | None = None) -> None:
        self._seconds = seconds
        self._calls = calls or _all_calls()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="specdec watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        told: set[tuple[PluginId, str]] = set()
        while not self._over.wait(min(MOST_BETWEEN_S, self._seconds / 4)):
            for call in self._calls.now:
                if time.monotonic() - call.started > self._seconds and (call.plugin, call.doing) not in told:
                    told.add((call.plugin, call.doing))
                    logger.warning("%s", self._warning(call))

    def _warning(self, call: Call) -> str:
        facts = {
            "where": call.place(),
            "effect": "every request waits for it; nothing is ended, and the results are not affected",
            "fix": "end the loop or the wait; Ctrl-C ends the command, a second one at once",
        }
        return message("SD-W317", f"{call.doing} has not ended after {self._seconds:g} s", facts, call.plugin)


class Interrupted:
    """Says where in a plugin an interrupt came."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._last = -SAME_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before < SAME_S:
            return
        call = self._calls.here()
        if call is not None:
            print(f"interrupted in {call}\n  at {call.place(frame)}", file=sys.stderr, flush=True)
        raise KeyboardInterrupt


@cache
def _all_calls() -> Calls:
    """Python never forgets a listener, so there is one."""
    calls = Calls()
    calls.listen()
    return calls
