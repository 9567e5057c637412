"""`specdec doctor` says which of the installed versions were tried together."""

from __future__ import annotations

import json

import pytest

from specdec.cli import _checks, _tried

CELL = {"date": "2026-11-26", "commit": "0123456789abcdef"}
OLD = {"python": "3.11.7", "torch": "2.11.0", "transformers": "5.19.0", "numpy": "2.3.0"}
NEW = {"python": "3.13.0", "torch": "2.15.0+cu132", "transformers": "5.24.0", "numpy": "2.5.5"}
CELLS = {
    "floors": CELL | {"versions": OLD, "passed": True},
    "newest-3.13": CELL | {"versions": NEW, "passed": False},
    "pinned-3.12": CELL | {"because": "no such build"},
}


@pytest.fixture(autouse=True)
def record(tmp_path, monkeypatch):
    monkeypatch.setattr(_tried, "RECORD", tmp_path / "versions.json")
    _tried.RECORD.write_text(json.dumps(CELLS))


@pytest.mark.parametrize(
    ("python", "torch", "transformers", "said"),
    [
        ("3.11", "2.11.0", "5.19.0", (True, "passed as floors on 2026-11-26, commit 01234567")),
        ("3.13", "2.15.0", "5.24.0", (False, "failed as newest-3.13 on 2026-11-26, commit 01234567")),
        (
            "3.13",
            "2.16.0",
            "5.20.1",
            (False, "torch 2.16.0 (tried: 2.11.0, 2.15.0); transformers 5.20.1 (tried: 5.19.0, 5.24.0)"),
        ),
        ("3.11", "2.15.0", "5.24.0", (False, "each of them was tried, and not together")),
    ],
)
def test_what_was_tried_of_these_versions(python, torch, transformers, said):
    assert _tried.said_of({"python": python, "torch": torch, "transformers": transformers}) == said


def test_doctor_has_a_line_and_versions_that_nobody_tried_are_no_fault():
    _tried.RECORD.write_text("{}")
    (found,) = _checks.check_tried()
    assert found.subject.startswith("tried together: python 3.")
    assert (found.status, found.fix) == ("note", None)
    _tried.RECORD.write_text(json.dumps({"mine": CELL | {"versions": _tried.installed(), "passed": True}}))
    (found,) = _checks.check_tried()
    assert (found.status, found.found) == ("ok", "passed as mine on 2026-11-26, commit 01234567")
