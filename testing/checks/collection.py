"""A check is a function of a Subject whose docstring is the rule it checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import fill, indent

from ..report import Level
from ..subject import Subject

WIDTH = 96


@dataclass(frozen=True)
class Check:
    """One rule. `run` returns nothing, or raises Violation or NotApplicable."""

    name: str
    level: Level
    rule: str
    run: Callable[[Subject], None]

    @property
    def text(self) -> str:
        """Describe the check on a terminal, with the command that runs it alone."""
        told = {"checks": fill(self.rule, WIDTH), "alone": f"specdec check TARGET --only {self.name}"}
        sections = [f"{label}\n{indent(text, '  ')}" for label, text in told.items()]
        return "\n\n".join([f"{self.name}   [a check, from level {self.level} on]", *sections])


class Collection:
    """The checks of one module, in the order in which they are written."""

    def __init__(self) -> None:
        self._checks: list[Check] = []

    def __iter__(self) -> Iterator[Check]:
        return iter(self._checks)

    def at(self, level: Level) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
        """Decorator: the function is a check of this level and of those above it."""

        def add(run: Callable[[Subject], None]) -> Callable[[Subject], None]:
            rule = " ".join((inspect.getdoc(run) or "").split())
            self._checks.append(Check(run.__name__, level, rule, run))
            return run

        return add
