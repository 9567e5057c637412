"""The command line's door: `pytest --pyargs specdec.testing --proposer mypkg.MyProposer`, without a test file.

Loaded by pytest at its start, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

LEVELS = ("basic", "standard", "full")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `pytest --pyargs specdec.testing`."""
    group = parser.getgroup("specdec", "conformance of proposers")
    group.addoption(
        "--proposer",
        action="append",
        default=[],
        help="a method, package.module:Class, package.module.Class or a checkpoint; may be repeated",
    )
    group.addoption(
        "--proposer-config",
        type=json.loads,
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
        type=json.loads,
        default={},
        metavar="JSON",
        help='checks that are expected to fail, with the reason: {"row_order": "issue 12"}',
    )


def pytest_configure(config: pytest.Config) -> None:
    """A --proposer may be in a file of the working directory, as for `specdec check`."""
    if config.getoption("--proposer"):
        sys.path.append(str(config.invocation_params.dir))  # last: a file there hides nothing that is installed
