"""The core's host of a proposer in a server that runs for months: it is watched, and can be switched on again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from specdec.core.host import EngineMetrics
from specdec.sdk import RequestView
from specdec.sdk.errors import message

from ..best_path import PathHost
from .watch import Watch

logger = logging.getLogger("specdec")

Answer = TypeVar("Answer")
Event = Literal["start", "preempt", "finish"]
LONGEST = 64
"""Times the first pause: no later one is longer."""


class SupervisedHost(PathHost):
    """A proposer's host that saves events while the proposer is switched off, and tells it afterwards.

    Requests that ran meanwhile get no drafts any more, because it has not seen all of their tokens.
    """

    def __init__(self, *args: Any, watch: Watch, **others: Any) -> None:
        super().__init__(*args, **others)
        self._watch = watch
        self._untold: dict[str, list[tuple[Event, RequestView]]] = {}  # by request id

    def start(self, request: RequestView) -> None:
        self._tell("start", request)

    def preempt(self, request: RequestView) -> None:
        self._tell("preempt", request)

    def finish(self, request: RequestView) -> None:
        self._tell("finish", request)

    def resume(self) -> None:
        """Switch it on again, on probation: the next error switches it off."""
        self.enabled = True
        self._num_errors -= 1
        untold, self._untold = self._untold, {}
        for events in untold.values():
            for event, request in events:
                self._tell(event, request)
        self._stale |= self._started

    def forgive(self) -> None:
        """The probation is over."""
        self._num_errors = 0

    def _tell(self, event: Event, request: RequestView) -> None:
        if self.enabled:
            tell = {"start": super().start, "preempt": super().preempt, "finish": super().finish}[event]
            tell(request)
            return
        events = self._untold.setdefault(request.request_id, [])
        events.append((event, request))
        if event == "finish" and events[0][0] == "start":  # it never heard of this request
            del self._untold[request.request_id]

    def _attempt(self, method: str, call: Callable[[], Answer]) -> Answer:
        with self._watch.calling(method):
            return super()._attempt(method, call)


class Retries:
    """When a proposer that was switched off is asked again: after a number of steps, then after twice as many, ...

    Steps and not seconds: all workers of a tensor-parallel group count the same ones.
    """

    def __init__(self, host: SupervisedHost, metrics: EngineMetrics, after_steps: int) -> None:
        """after_steps: the first pause; 0: it stays off."""
        self._host = host
        self._counts = metrics.counts
        self._counts["proposer_retries"] = 0
        self._first = self._pause = after_steps
        self._steps = 0  # since it was switched on or off
        self._off = False

    def begin_step(self) -> None:
        """Count a step of the engine. Ask the proposer again if the pause is over."""
        self._steps += 1
        if self._host.enabled:
            if self._pause > self._first and self._steps >= self._pause:
                self._pause = self._first
                self._host.forgive()
        elif not self._off:
            self._off, self._steps = True, 0
        elif self._first and self._steps >= self._pause:
            self._resume()

    def stop(self) -> None:
        """Leave the proposer switched off from now on."""
        self._first = 0

    def _resume(self) -> None:
        facts = {"was off for": f"{self._steps} steps"}
        self._off, self._steps = False, 0
        self._pause = min(2 * self._pause, LONGEST * self._first)
        self._counts["proposer_retries"] += 1
        facts |= {"requests that run now": "get no drafts any more: it has not seen all of their tokens"}
        facts |= {"if it fails again": f"it is off for {self._pause} steps"}
        logger.warning("%s", message("SD-W217", "the proposer is asked again", facts, self._host.plugin))
        self._host.resume()
