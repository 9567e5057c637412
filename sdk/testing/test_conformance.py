"""Collected by `pytest --pyargs specdec.sdk.testing`; see `pytest_plugin`."""

from __future__ import annotations

import pytest

from specdec.sdk.testing.checks import Check
from specdec.sdk.testing.subject import Subject
from specdec.sdk.testing.suite import as_parameters, require


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every check of the level for every --proposer; none given: nothing to do."""
    config = metafunc.config
    names = config.getoption("--proposer", [])
    settings, target = config.getoption("--proposer-config", {}), config.getoption("--proposer-target", "tiny")
    subjects = [pytest.param(Subject(name, settings, target), id=name) for name in names]
    checks = as_parameters(config.getoption("--proposer-level", "standard"), config.getoption("--proposer-xfails", {}))
    metafunc.parametrize("subject", subjects, scope="module")
    metafunc.parametrize("check", checks if subjects else [])


def test_proposer(check: Check, subject: Subject) -> None:
    """The law of the check holds for the proposer."""
    require(check, subject)
