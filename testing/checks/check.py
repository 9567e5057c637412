"""A check is a function of a Subject whose docstring is the rule it checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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


def check(level: Level) -> Callable[[Callable[[Subject], None]], Check]:
    """Decorator: the function becomes a check of this level and of those above it."""

    def made(run: Callable[[Subject], None]) -> Check:
        return Check(run.__name__, level, " ".join((inspect.getdoc(run) or "").split()), run)

    return made
