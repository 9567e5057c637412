"""The command line's door: `pytest --pyargs specdec.testing --proposer mypkg.MyProposer`, without a test file.

Loaded by pytest at its start, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Generator
from typing import Any

import pytest

LEVELS = ("basic", "standard", "full")
PROPOSERS = "specdec_proposers"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """The options of `pytest --pyargs specdec.testing`. In other runs their names may be another project's."""
    if not any("specdec" in each and "testing" in each for each in args):
        return
    group = parser.getgroup("specdec", "conformance of proposers")
    group.addoption(
        "--proposer",
        dest=PROPOSERS,
        action="append",
        default=[],
        help="a method, package.module:Class, package.module.Class or a checkpoint; may be repeated",
    )
    group.addoption(
        "--proposer-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="further keys of speculative_config",
    )
    group.addoption("--proposer-level", choices=LEVELS, default="standard", help="which checks to run")
    group.addoption("--proposer-target", default="tiny", metavar="MODEL", help="the target to check on")
    group.addoption(
        "--proposer-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="the longest that one check may take; 0: as long as it likes",
    )
    group.addoption(
        "--proposer-xfails",
        type=json_object,
        default={},
        metavar="JSON",
        help='checks that are expected to fail, with the reason: {"row_order": "issue 12"}',
    )


def json_object(text: str) -> dict[str, Any]:
    """Read the value of an option. Raises ArgumentTypeError for anything but a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text!r} is not a JSON object, such as {{}}")
    return value


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """The checks of a --proposer run in a child: a proposer that ends the process does not end it with success."""
    if not config.getoption(PROPOSERS, None) or sys.platform == "win32":
        return (yield)
    from .calls import Calls, Interrupted
    from .supervision import Notes, fork

    notes = Notes()
    fork(notes)
    calls = Calls()
    calls.tell(lambda now, last: notes.running(str(now) if now else f"nothing of a plugin; last was {last}"))
    calls.listen()
    signal.signal(signal.SIGINT, Interrupted(calls))
    status: object = pytest.ExitCode.USAGE_ERROR
    try:
        status = yield
    finally:
        notes.over(status if isinstance(status, int) else pytest.ExitCode.INTERNAL_ERROR)
    return status


def pytest_configure(config: pytest.Config) -> None:
    """A --proposer may be in a file of the working directory, as for `specdec check`."""
    if config.getoption(PROPOSERS, None):
        sys.path.append(str(config.invocation_params.dir))  # last: a file there hides nothing that is installed
