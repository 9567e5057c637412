"""All checks, cheapest first: each module holds those of one subject."""

from __future__ import annotations

from ..report import LEVELS, Level
from . import distribution, end_to_end, form, growth, history, isolation, machine, needs, obligations, streams
from .check import Check

MODULES = (form, isolation, history, obligations, needs, distribution, end_to_end, growth, machine, streams)
ALL_CHECKS = tuple(each for module in MODULES for each in vars(module).values() if isinstance(each, Check))

__all__ = ["ALL_CHECKS", "Check", "checks_of"]


def checks_of(level: Level) -> tuple[Check, ...]:
    """The checks of a level, those of the levels below it first."""
    wanted = LEVELS[: LEVELS.index(level) + 1]
    return tuple(check for each in wanted for check in ALL_CHECKS if check.level == each)
