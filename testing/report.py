"""What a check says: passed, failed with the fix, or why it does not apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.sdk.errors import SpecdecError

Level = Literal["basic", "standard", "full"]
LEVELS: tuple[Level, ...] = ("basic", "standard", "full")

Status = Literal["passed", "failed", "explained", "skipped", "expected_failure", "unexpected_pass"]

DIFFERENCE = "a draft differs"
"""The cause of every violation that a comparison of two instances finds."""


class Violation(AssertionError):
    """A proposer broke the rule of a check.

    expected, found: in the words of the contract. fix: what the author should change. where: the step, if there is one.
    cause: equal in the violations that one mistake makes; empty where nothing is known of others.
    """

    def __init__(self, *, expected: str, found: str, fix: str, where: str = "", cause: str = "") -> None:
        self.cause = cause
        self.facts = {"expected": expected, "found": found, "where": where, "fix": fix}
        super().__init__(render(self.facts))


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
        return f"{self.check}: {self.rule}\n{render(self.facts)}".rstrip()


def cause_of(error: SpecdecError) -> str:
    """Equal for equal mistakes: the code, with the author's line if the error has one."""
    return f"{error.code} {error.facts.get('where') or error.summary}"


def render(facts: dict[str, str]) -> str:
    """Put each fact that is not empty on an indented line. Longer facts keep their lines below the first."""
    told = {label: value for label, value in facts.items() if value}
    width = max(map(len, told), default=0)
    lines = []
    for label, value in told.items():
        first, *rest = value.splitlines()
        lines += [f"  {label:<{width}}  {first}", *(f"  {'':<{width}}  {line}" for line in rest)]
    return "\n".join(lines)
