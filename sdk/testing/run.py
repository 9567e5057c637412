"""The function's door: one list of checks, run one after the other."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from specdec.core.registry import PluginSettings

from ..errors import ConfigError, SpecdecError, did_you_mean
from .checks import ALL_CHECKS, Check, checks_of
from .report import CheckResult, Level, NotApplicable, Violation
from .subject import Asked, Subject

FIRST = "loads"


def check_proposer(
    proposer: Asked,
    speculative_config: Mapping[str, Any] | None = None,
    *,
    level: Level = "standard",
    only: Sequence[str] = (),
    expected_failures: Mapping[str, str] | None = None,
    target: str = "tiny",
    seed: int = 0,
    plugin_settings: PluginSettings | None = None,
    on_fail: Literal["collect", "raise"] = "collect",
) -> list[CheckResult]:
    """Check a proposer against the contract, on the CPU and offline.

    proposer: a class, a `method` of `speculative_config` or a checkpoint. `speculative_config`: its other keys, as
    `LLM` takes them (`num_speculative_tokens` is 4 if left out, or the most that it drafts). only: ids of checks,
    instead of the whole level. expected_failures: check id -> reason; one that passes after all counts as a failure.
    on_fail "raise" raises the first Violation. Raises ConfigError SD-E132 for an unknown check or an empty reason,
    PluginLoadError or ConfigError if there is no such proposer.
    """
    subject = Subject(proposer, dict(speculative_config or {}), target, seed, plugin_settings or PluginSettings())
    return list(results(subject, level, only, expected_failures or {}, on_fail=on_fail))


def results(
    subject: Subject,
    level: Level,
    only: Sequence[str] = (),
    expected_failures: Mapping[str, str] | None = None,
    *,
    on_fail: Literal["collect", "raise"] = "collect",
) -> Iterator[CheckResult]:
    """One result after the other, as they come."""
    expected = dict(expected_failures or {})
    checks = chosen_checks(level, only)
    refuse_unknown(list(expected))
    refuse_empty_reasons(expected)
    _ = subject.resolved
    loads = True
    for check in checks:
        result = run_check(check, subject) if loads else _skipped(check, f"it does not load: see {FIRST}")
        result = as_expected(result, expected.get(check.name))
        if on_fail == "raise" and not result.ok:
            raise AssertionError(result.text)
        loads = loads and not (check.name == FIRST and result.status == "failed")
        yield result


def run_check(check: Check, subject: Subject) -> CheckResult:
    """Passed, failed or skipped. An error of the proposer is a failure with its text."""
    start = time.perf_counter()
    facts: dict[str, str] = {}
    status: Literal["passed", "failed", "skipped"] = "failed"
    try:
        with _quiet():
            check.run(subject)
        status = "passed"
    except NotApplicable as reason:
        status, facts = "skipped", {"reason": str(reason)}
    except Violation as violation:
        facts = dict(violation.facts)
    except SpecdecError as error:
        facts = {"expected": "no error", "found": str(error)}
    except Exception:
        facts = {"expected": "no error", "found": traceback.format_exc()}
    if status == "failed":
        facts["reproduce"] = _reproduce(check, subject)
    seconds = time.perf_counter() - start
    return CheckResult(check=check.name, level=check.level, status=status, seconds=seconds, law=check.law, facts=facts)


@contextmanager
def _quiet() -> Iterator[None]:
    """What the engine says whenever it loads a proposer, it need not say for every check."""
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
    """The checks of a level, or those that are named. Raises ConfigError SD-E132 for an unknown id."""
    refuse_unknown(only)
    return tuple(check for check in ALL_CHECKS if check.name in only) if only else checks_of(level)


def refuse_unknown(names: Sequence[str]) -> None:
    """Raise ConfigError SD-E132 if one of the names is no check."""
    known = [check.name for check in ALL_CHECKS]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            facts = {"did you mean": hint or "", "checks": ", ".join(known)}
            raise ConfigError("SD-E132", f"there is no check {name!r}", {k: v for k, v in facts.items() if v})


def refuse_empty_reasons(expected: Mapping[str, str]) -> None:
    """Raise ConfigError SD-E132 for an expected failure without a reason."""
    for name, reason in expected.items():
        if not isinstance(reason, str) or not reason.strip():
            facts = {"found": repr(reason), "fix": f'expected_failures={{"{name}": "why, and until when"}}'}
            raise ConfigError("SD-E132", f"the expected failure of {name!r} has no reason", facts)


def _skipped(check: Check, reason: str) -> CheckResult:
    return CheckResult(
        check=check.name, level=check.level, status="skipped", seconds=0.0, law=check.law, facts={"reason": reason}
    )


def _reproduce(check: Check, subject: Subject) -> str:
    settings = f", {dict(subject.settings)}" if subject.settings else ""
    return f"check_proposer({subject.label!r}{settings}, only=[{check.name!r}], seed={subject.seed})"
