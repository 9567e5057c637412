"""A proposer for tests that knows the truth and fails where it is told to, in every way that Python has."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from engine_proposers import Scripted, Textless

from specdec.sdk import Draft, ProposerConfig, ProposerError, RequestView, StepView


class Panic(BaseException):
    """What a proposer in another language raises for its own panics."""


class Unmade(ProposerError):
    """An error whose author forgot the constructor of its base."""

    def __init__(self) -> None: ...


def _without_facts() -> ProposerError:
    error = ProposerError("SD-E210", "a summary")
    error.facts = None
    return error


def _with_a_number_as_code() -> ProposerError:
    return ProposerError(7, "a summary")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: RuntimeError("on purpose"),
    "exit": lambda: SystemExit(3),
    "generator exit": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "panic": lambda: Panic("on purpose"),
    "textless": Textless,
    "unmade": Unmade,
    "without facts": _without_facts,
    "a number as code": _with_a_number_as_code,
}
METHODS = ("on_start", "on_preempt", "on_finish", "observe", "propose")


class Erratic(Scripted):
    """Fails in the calls that its options list: (method, number of the call from 0, key of ERRORS or "no draft")."""

    class Options(Scripted.Options):
        faults: tuple[tuple[str, int, str], ...] = ()

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.faults = {(method, number): fault for method, number, fault in self.options.faults}
        self.num_calls: Counter[str] = Counter()
        self.events: list[tuple[str, str]] = []

    def trip(self, method: str) -> bool:
        """Fail if it is this call's turn to; whether it is to return no draft."""
        fault = self.faults.get((method, self.num_calls[method]))
        self.num_calls[method] += 1
        if fault in ERRORS:
            raise ERRORS[fault]()
        return fault is not None

    def on_start(self, request: RequestView) -> None:
        super().on_start(request)
        self.events.append(("on_start", request.request_id))
        self.trip("on_start")

    def on_preempt(self, request: RequestView) -> None:
        self.events.append(("on_preempt", request.request_id))
        self.trip("on_preempt")

    def on_finish(self, request: RequestView) -> None:
        super().on_finish(request)
        self.events.append(("on_finish", request.request_id))
        self.trip("on_finish")

    def observe(self, step: StepView) -> None:
        self.trip("observe")

    def propose(self, step: StepView) -> Draft:
        return None if self.trip("propose") else super().propose(step)
