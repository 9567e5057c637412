"""Collected by `pytest --pyargs specdec.testing`; see `pytest_plugin`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from .checks import Check
from .pytest_plugin import PROPOSERS
from .run import Run
from .subject import Subject
from .suite import as_parameters, require


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every check of the level for every --proposer; none given: nothing to do."""
    config = metafunc.config
    names = config.getoption(PROPOSERS, [])
    settings, target = config.getoption("--proposer-config", {}), config.getoption("--proposer-target", "tiny")
    subjects = [pytest.param(Subject(name, settings, target), id=name) for name in names]
    checks = as_parameters(config.getoption("--proposer-level", "standard"), config.getoption("--proposer-xfails", {}))
    metafunc.parametrize("subject", subjects, scope="module")
    metafunc.parametrize("check", checks if subjects else [])


@pytest.fixture(scope="module")
def run_of(pytestconfig: pytest.Config) -> Callable[[str], Run]:
    """What the checks of each --proposer have found so far."""
    timeout, xfails = pytestconfig.getoption("--proposer-timeout"), pytestconfig.getoption("--proposer-xfails")
    return cache(lambda label: Run(timeout, xfails))


def test_proposer(check: Check, subject: Subject, run_of: Callable[[str], Run], pytestconfig: pytest.Config) -> None:
    """The rule of the check holds for the proposer."""
    require(check, subject, run_of(subject.label), pytestconfig)
