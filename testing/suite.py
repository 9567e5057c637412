"""The class's door: one line in a test file, every check a test with a readable id.

from specdec.testing import ProposerConformance

class TestMine(ProposerConformance):
    proposer = MyProposer
    speculative_config = {"num_speculative_tokens": 3}
    level = "full"
    expected_failures = {"row_order": "rows are ranked by age; will be fixed in 0.3"}
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from specdec.core.host import SpeculativeConfig

from .checks import Check
from .report import Level
from .run import Run, chosen_checks, refuse_unusable
from .subject import Asked, Subject
from .time_limit import GRACE_S, TIMEOUT_S


class ProposerConformance:
    """Subclass it, name it Test..., set `proposer`: a class, a method of `speculative_config`, or a checkpoint.

    The other attributes are those of `check_proposer`. An expected failure is strict: it fails when it passes.
    """

    proposer: ClassVar[Asked]
    speculative_config: ClassVar[Mapping[str, Any]] = {}
    level: ClassVar[Level] = "standard"
    expected_failures: ClassVar[Mapping[str, str]] = {}
    target: ClassVar[str] = "tiny"
    seed: ClassVar[int] = 0
    timeout: ClassVar[float] = TIMEOUT_S

    @pytest.fixture(scope="class")
    @classmethod
    def conformance_run(cls) -> Run:
        """What the checks of this class have found so far."""
        return Run(cls.timeout, cls.expected_failures)

    @pytest.fixture
    def subject(self) -> Subject:
        """The proposer under test; override it for one that needs more than these attributes."""
        cls = type(self)
        return Subject(cls.proposer, SpeculativeConfig.as_mapping(cls.speculative_config), cls.target, cls.seed)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each check of the level."""
        if "check" in metafunc.fixturenames:
            cls = type(self)
            metafunc.parametrize("check", as_parameters(cls.level, cls.expected_failures))

    def test_conforms(self, check: Check, subject: Subject, conformance_run: Run, pytestconfig: pytest.Config) -> None:
        """The rule of the check holds."""
        require(check, subject, conformance_run, pytestconfig)


def as_parameters(level: Level, expected_failures: Mapping[str, str]) -> list[Any]:
    """The checks of a level as pytest parameters, expected failures marked with their reasons."""
    refuse_unusable(expected_failures)
    return [
        pytest.param(check, id=check.name, marks=_marks(expected_failures.get(check.name)))
        for check in chosen_checks(level)
    ]


def require(check: Check, subject: Subject, run: Run, config: pytest.Config) -> None:
    """Run a check inside a test: a failure fails it, and one that does not apply or is explained is skipped.

    What explains it has failed before: of the checks that fail for one cause, the first one fails its test.
    """
    with _process_ends_after(run.timeout, config):
        result = run.check(check, subject)
    if result.status == "skipped":
        pytest.skip(result.facts["reason"])
    if result.status == "explained":
        pytest.skip(f"fails, and is explained by {result.facts['explained_by']}: {result.facts['found']}")
    if result.status == "failed":
        pytest.fail(result.text, pytrace=False)


@contextmanager
def _process_ends_after(seconds: float, config: pytest.Config) -> Iterator[None]:
    """End the process if the block cannot be interrupted, with the stack of every thread and the check's name. 0 means
    never.
    """
    if not seconds:
        yield
        return
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        stderr = os.dup(2)  # past pytest's capture
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.close(stderr)


def _marks(reason: str | None) -> tuple[pytest.MarkDecorator, ...]:
    return () if reason is None else (pytest.mark.xfail(reason=reason, strict=True, raises=pytest.fail.Exception),)
