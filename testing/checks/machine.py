"""Full: hypothesis looks for a history that breaks a proposer, and shortens the one it finds."""

from __future__ import annotations

import importlib.util
from typing import Any

from ..compare import FreshPrefill
from ..moves import Move
from ..report import NotApplicable, Violation
from ..stage import Stage
from ..subject import Subject
from .check import check

NUM_HISTORIES = 12
NUM_EVENTS = 20


@check("full")
def state_machine(subject: Subject) -> None:
    """No history of starts, steps, preemptions, aborts and ends makes a draft differ from that of a fresh prefill."""
    if importlib.util.find_spec("hypothesis") is None:
        raise NotApplicable("hypothesis is not installed; it comes with the extra specdec-sdk[testing]")
    subject.need_whole_prefill()
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    chosen = settings(
        max_examples=NUM_HISTORIES,
        stateful_step_count=NUM_EVENTS,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    for probabilistic in subject.modes:
        try:
            run_state_machine_as_test(_machine_of(subject, probabilistic=probabilistic), settings=chosen)
        except Violation as violation:
            history = "\n".join(vars(violation).get("__notes__", ()))
            told = {label: value for label, value in violation.facts.items() if label != "where"}
            raise Violation(**told, where=history or violation.facts["where"], cause=violation.cause) from None


def _machine_of(subject: Subject, *, probabilistic: bool) -> Any:
    """A state machine class whose every instance is a new stage. With shared state one request runs, and never ends."""
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

    shared = subject.needs.state == "shared"
    names = st.sampled_from(["a"] if shared else ["a", "b", "c", "d", "e"])

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            subject.close(subject.opened)  # those of the history before
            self.stage: Stage = subject.stage(probabilistic=probabilistic)
            self.fresh = FreshPrefill(subject, probabilistic=probabilistic)

        @rule(name=names, length=st.integers(1, 30), text=st.integers(0, 3))
        def start(self, name: str, length: int, text: int) -> None:
            if name not in self.stage.requests:
                self.stage.add(name, self.stage.script.prompt(f"text {text}", length))

        @precondition(lambda self: bool(self.stage.requests))
        @rule(order=st.permutations(["a", "b", "c", "d", "e"]), count=st.integers(1, 4), chunk=st.integers(1, 40))
        def step(self, order: list[str], count: int, chunk: int) -> None:
            placed = [name for name in order if name in self.stage.requests]
            waiting = [name for name in placed if self.stage.requests[name].row < 0]
            left_out = set(waiting[self.stage.num_free_rows :])
            moves = [Move(name, num_tokens=chunk) for name in placed if name not in left_out][:count]
            shown = self.stage.step(moves) if moves else None
            if shown is not None:
                self.fresh.require(self.stage, shown)

        @rule(name=names)
        def preempt(self, name: str) -> None:
            if name in self.stage.requests and self.stage.requests[name].row >= 0:
                self.stage.preempt(name)

        @precondition(lambda self: not shared)
        @rule(name=names)
        def finish(self, name: str) -> None:
            if name in self.stage.requests:
                self.stage.finish(name)

    return Machine
