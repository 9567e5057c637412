"""The function's door: one list of checks, run one after the other."""

from __future__ import annotations

import json
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from specdec.core.host import SpeculativeConfig, registry
from specdec.sdk.errors import ConfigError, ProposerError, SpecdecError, not_offered

from .checks import ALL_CHECKS, Check, checks_of
from .isolated import in_a_fork
from .report import (
    DIFFERENCE,
    LEVELS,
    NEVER_CALLED,
    SETTINGS_CHANGED,
    CheckResult,
    Level,
    NotApplicable,
    Status,
    Violation,
    cause_of,
)
from .subject import Asked, Subject
from .time_limit import MOST_S, TIMEOUT_S, OutOfTime, time_limit
from .torch_settings import settings_kept

Isolation = Literal["process"]
FIRST = "loads"
SIMPLEST = ("deterministic", "accepts_and_rejects")
"""Comparisons that every later one contains: where one of them fails, a later difference says nothing new."""

NUM_FRAMES = 8  # of a stack that is shown


def check_proposer(
    proposer: Asked,
    speculative_config: Mapping[str, Any] | None = None,
    *,
    level: Level = "standard",
    only: Sequence[str] = (),
    expected_failures: Mapping[str, str] | None = None,
    target: str = "tiny",
    seed: int = 0,
    timeout: float = TIMEOUT_S,
    isolation: Isolation | None = None,
) -> list[CheckResult]:
    """Check a proposer against the contract, on the CPU and offline.

    proposer: a class, a `method` of `speculative_config` or a checkpoint. `speculative_config`: its other keys, as
    `LLM` takes them (`num_speculative_tokens` is 4 if left out, or the most that it drafts). only: ids of checks,
    instead of the whole level. expected_failures: check id -> reason; one that passes after all counts as a failure.
    timeout: seconds for each check, 0 for no limit; it needs the main thread and POSIX signals, and interrupts Python
    code only. isolation: "process" runs each check in a fork, and one that ends it has failed. None runs all in this
    process. Raises ConfigError SD-E132 for an argument that is not offered or an empty reason, PluginLoadError or
    ConfigError if there is no such proposer, and what `LLM` raises for a target that does not load.
    """
    subject = Subject(proposer, SpeculativeConfig.as_mapping(speculative_config or {}), target, seed)
    run = Run(timeout, expected_failures or {}, isolation=isolation)
    return list(results(subject, level, only, run))


@dataclass
class Run:
    """Checks of one proposer, one after the other: each has a limit of time, and one cause is reported once.

    An expected failure explains no other, and is explained by none. After a check that shows that the proposer does
    not load, or that ran out of time, nothing is run any more.
    """

    timeout: float = TIMEOUT_S  # seconds for each check; 0: no limit
    expected: Mapping[str, str] = field(default_factory=dict)  # expected failures: check id -> reason
    before: Callable[[Check], None] = lambda check: None  # called with each check before it runs
    isolation: Isolation | None = None  # see `check_proposer`
    _first: dict[str, str] = field(default_factory=dict)  # cause -> the check that it failed first
    _begun: bool = False
    _ended: str = ""  # why nothing is run any more

    def __post_init__(self) -> None:
        """Raises ConfigError SD-E132 for a timeout that is no such number."""
        if not isinstance(self.timeout, int | float) or not 0 <= self.timeout <= MOST_S:
            facts = {"found": repr(self.timeout), "expected": f"0 .. {MOST_S} seconds", "fix": "0, for no limit"}
            raise ConfigError("SD-E132", "a check cannot have this timeout", facts)

    def check(self, check: Check, subject: Subject) -> CheckResult:
        """The check's result in the light of those before it."""
        self.before(check)
        if self._ended:
            return _result(check, "skipped", {"reason": self._ended})
        if self.isolation is None and not self._begun:
            self._begun = True
            subject.target.restore_weights()  # a proposer that was checked before may have written to them
        run = run_check if self.isolation is None else _run_apart
        result = run(check, subject, self.timeout)
        if result.cause.startswith("SD-E221") and self.isolation is None:
            self._ended = f"{check.name} did not end, and nothing is run after it"
        if result.status != "failed" or check.name in self.expected:
            return result
        if check.name == FIRST and result.cause not in (NEVER_CALLED, SETTINGS_CHANGED):
            self._ended = f"it does not load: see {FIRST}"
        return self._explained(result)

    def _explained(self, result: CheckResult) -> CheckResult:
        first = self._first.get(result.cause, "")
        if first:
            return replace(result, status="explained", facts={"explained_by": first} | result.facts)
        if result.cause and (result.cause != DIFFERENCE or result.check in SIMPLEST):
            self._first[result.cause] = result.check
        return result


def results(subject: Subject, level: Level, only: Sequence[str], run: Run) -> Iterator[CheckResult]:
    """Yield each result as it comes."""
    checks = chosen_checks(level, only)
    refuse_unusable(run.expected)
    _ = subject.resolved
    for check in checks:
        yield as_expected(run.check(check, subject), run.expected.get(check.name))


def run_check(check: Check, subject: Subject, timeout: float) -> CheckResult:
    """Passed, failed or skipped. An error of the proposer is a failure with its text, and so is one that never ends.

    Raises what the target raises if that does not load.
    """
    _ = subject.target
    start = time.perf_counter()
    status: Status = "passed"
    facts: dict[str, str] = {}
    cause = ""
    try:
        with _quiet(), time_limit(timeout), settings_kept():
            _run_closing(check, subject)
    except NotApplicable as reason:
        status, facts = "skipped", {"reason": str(reason)}
    except (Exception, OutOfTime) as error:
        status = "failed"
        facts, cause = _seen(error, subject, timeout)
        facts["reproduce"] = _reproduce(check, subject)
    return _result(check, status, facts, time.perf_counter() - start, cause)


def _run_closing(check: Check, subject: Subject) -> None:
    """Run it, and close the proposers that it made, but for one that does not come back."""
    try:
        check.run(subject)
    except OutOfTime:
        subject.opened.clear()
        raise
    finally:
        subject.close(subject.opened)


def _run_apart(check: Check, subject: Subject, timeout: float) -> CheckResult:
    """The same in a process of its own, which may end."""

    def work() -> str:
        try:
            return json.dumps(asdict(run_check(check, subject, timeout)))
        except Exception:
            return json.dumps(None)

    start = time.perf_counter()
    said = in_a_fork(work, timeout)
    if isinstance(said, str):
        result = json.loads(said)
        return CheckResult(**result) if result else run_check(check, subject, timeout)  # raises here what it did there
    facts = {
        "expected": "a process that goes on",
        "found": f"it ended {said.how}",
        "running": said.running,
        "stack": said.stack,
        "fix": "a proposer must not end the process (os._exit, a crash, a signal); raise an error instead",
        "reproduce": _reproduce(check, subject, isolation="process"),
    }
    cause = f"SD-E231 {said.how} {said.running}"
    return _result(check, "failed", facts, time.perf_counter() - start, cause)


def _seen(error: BaseException, subject: Subject, timeout: float) -> tuple[dict[str, str], str]:
    """The facts of a failure, and its cause."""
    if isinstance(error, Violation):
        return dict(error.facts), error.cause
    if isinstance(error, OutOfTime):
        error = _out_of_time(error, subject, timeout)
    if isinstance(error, SpecdecError):
        return {"expected": "no error", "found": str(error)}, cause_of(error)
    place = registry.author_frame(error, subject.resolved.plugin.target)
    return {"expected": "no error", "found": "".join(traceback.format_exception(error))}, f"{type(error)} {place}"


def _out_of_time(error: OutOfTime, subject: Subject, timeout: float) -> ProposerError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "_interrupt"]
    facts = {
        "where": registry.author_frame(error, subject.resolved.plugin.target),
        "stack": "\n".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames[-NUM_FRAMES:]),
        "fix": "find the loop or the wait that does not end; a check that only needs longer gets a larger timeout",
    }
    plugin = subject.resolved.plugin
    return ProposerError("SD-E221", f"the check did not end within {timeout:g} s", facts, plugin=plugin)


@contextmanager
def _quiet() -> Iterator[None]:
    """What the engine says whenever it loads a proposer, it need not say for every check: `loads` listens to it."""
    logger = logging.getLogger("specdec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def as_expected(result: CheckResult, reason: str | None) -> CheckResult:
    """The result in the light of an expectation that it fails: strict, so a pass is no pass."""
    if reason is None or result.status == "skipped":
        return result
    if result.status == "failed":
        return replace(result, status="expected_failure", facts={"reason": reason} | result.facts)
    facts = {"expected": f"a failure: {reason}", "found": "it passes", "fix": "take it out of expected_failures"}
    return replace(result, status="unexpected_pass", facts=facts)


def chosen_checks(level: Level, only: Sequence[str] = ()) -> tuple[Check, ...]:
    """The checks of a level, or those that are named. Raises ConfigError SD-E132 for an unknown level or id."""
    if level not in LEVELS:
        raise not_offered(f"there is no level {level!r}", str(level), LEVELS)
    only = [only] if isinstance(only, str) else only
    refuse_unknown(only)
    return tuple(check for check in ALL_CHECKS if check.name in only) if only else checks_of(level)


def refuse_unknown(names: Sequence[str]) -> None:
    """Raise ConfigError SD-E132 if one of the names is no check."""
    known = [check.name for check in ALL_CHECKS]
    for name in names:
        if name not in known:
            raise not_offered(f"there is no check {name!r}", name, known)


def refuse_unusable(expected: Mapping[str, str]) -> None:
    """Raise ConfigError SD-E132 for expected failures of what is no check, or without a reason."""
    if not isinstance(expected, Mapping):
        facts = {"found": f"{expected!r:.80}", "fix": 'expected_failures={"CHECK": "why, and until when"}'}
        raise ConfigError("SD-E132", "the expected failures have no reasons", facts)
    refuse_unknown(list(expected))
    for name, reason in expected.items():
        if not isinstance(reason, str) or not reason.strip():
            facts = {"found": repr(reason), "fix": f'expected_failures={{"{name}": "why, and until when"}}'}
            raise ConfigError("SD-E132", f"the expected failure of {name!r} has no reason", facts)


def _result(check: Check, status: Status, facts: dict[str, str], seconds: float = 0.0, cause: str = "") -> CheckResult:
    return CheckResult(
        check=check.name, level=check.level, status=status, seconds=seconds, rule=check.rule, facts=facts, cause=cause
    )


def _reproduce(check: Check, subject: Subject, **more: str) -> str:
    """The call that runs one check again."""
    settings = f", {dict(subject.settings)}" if subject.settings else ""
    if subject.target_model != Subject.target_model:
        more["target"] = subject.target_model
    further = "".join(f", {name}={value!r}" for name, value in more.items())
    return f"check_proposer({subject.label!r}{settings}, only=[{check.name!r}], seed={subject.seed}{further})"
