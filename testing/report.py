"""What a check says: passed, failed with the fix, or why it does not apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.sdk.errors import SpecdecError, message

Level = Literal["basic", "standard", "full"]
LEVELS: tuple[Level, ...] = ("basic", "standard", "full")

Status = Literal["passed", "failed", "explained", "skipped", "expected_failure", "unexpected_pass"]

DIFFERENCE = "a draft differs"
"""The cause of every violation that a comparison of two instances finds."""

NEVER_CALLED = "a method is never called"
SETTINGS_CHANGED = "a setting of torch was changed"


class Violation(AssertionError):
    """A proposer broke the rule of a check.

    expected, found: in the words of the contract. fix: what the author should change. where: the step, if there is one.
    cause: equal in the violations that one mistake makes; empty where nothing is known of others.
    """

    def __init__(self, *, expected: str, found: str, fix: str, where: str = "", cause: str = "") -> None:
        self.cause = cause
        self.facts = {"expected": expected, "found": found, "where": where, "fix": fix}
        super().__init__(found)


class NotApplicable(Exception):
    """The check has nothing to say about this proposer; the reason is reported."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The outcome of one check. `facts` of a failure: expected, found, where, fix, reproduce.

    `cause` of a failure: equal in those that one mistake makes. The first of them has the status "failed", the later
    ones "explained" and one fact more, `explained_by`, the first one's id.
    """

    check: str
    level: Level
    status: Status
    seconds: float
    rule: str
    facts: dict[str, str]
    cause: str = ""

    @property
    def ok(self) -> bool:
        """Whether this outcome lets the proposer pass: an expected failure does, an unexpected pass does not."""
        return self.status in ("passed", "skipped", "expected_failure")

    @property
    def text(self) -> str:
        """The check's id and rule, then one line per fact."""
        return message(f"{self.check}:", self.rule, {label: value for label, value in self.facts.items() if value})


def cause_of(error: SpecdecError) -> str:
    """Equal for equal mistakes: the code, with the author's line if the error has one."""
    return f"{error.code} {error.facts.get('where') or error.summary}"
