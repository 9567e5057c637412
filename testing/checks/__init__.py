"""All checks, cheapest first: each module holds those of one subject."""

from __future__ import annotations

from ..report import LEVELS, Level
from .collection import Check
from .distribution import CHECKS as DISTRIBUTION
from .end_to_end import CHECKS as END_TO_END
from .form import CHECKS as FORM
from .growth import CHECKS as GROWTH
from .history import CHECKS as HISTORY
from .isolation import CHECKS as ISOLATION
from .machine import CHECKS as MACHINE
from .needs import CHECKS as NEEDS
from .obligations import CHECKS as OBLIGATIONS
from .streams import CHECKS as STREAMS

ALL_CHECKS: tuple[Check, ...] = (
    *FORM, *ISOLATION, *HISTORY, *OBLIGATIONS, *NEEDS, *DISTRIBUTION, *END_TO_END, *GROWTH, *MACHINE, *STREAMS,
)  # fmt: skip

__all__ = ["ALL_CHECKS", "Check", "checks_of"]


def checks_of(level: Level) -> tuple[Check, ...]:
    """The checks of a level, those of the levels below it first."""
    wanted = LEVELS[: LEVELS.index(level) + 1]
    return tuple(check for each in wanted for check in ALL_CHECKS if check.level == each)
