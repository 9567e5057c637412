"""The record of tried versions: every cell of the matrix has its line, and the page says what the record says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import tried_versions

ROOT = Path(__file__).parents[2]
CELLS = json.loads(tried_versions.RECORD.read_text())


def test_every_cell_was_run_or_says_why_not():
    listed = subprocess.run([sys.executable, "-m", "nox", "-l", "--json"], cwd=ROOT, capture_output=True, check=True)
    assert {each["session"] for each in json.loads(listed.stdout)} == CELLS.keys() | {"targets"}
    assert [
        name
        for name, cell in CELLS.items()
        if not ({"versions", "passed", "summary"} <= cell.keys() or cell.get("because"))
    ] == []


def test_the_page_says_what_the_record_says():
    assert tried_versions.PAGE.read_text() == tried_versions.page(CELLS)
    assert [name for name, cell in CELLS.items() if cell.get("passed") and "failed" in cell["summary"]] == []


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    for name in ("RECORD", "PAGE"):
        monkeypatch.setattr(tried_versions, name, tmp_path / name)
    tried_versions.RECORD.write_text("{}")
    return tmp_path


@pytest.mark.slow
def test_a_failing_cell_is_written_down_and_ends_with_one(elsewhere):
    (elsewhere / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    assert tried_versions.main("cell", str(elsewhere / "test_two.py")) == 1
    (cell,) = json.loads(tried_versions.RECORD.read_text()).values()
    assert (cell["passed"], cell["summary"]) == (False, "1 failed, 1 passed")
    assert cell["versions"].keys() >= {"python", "torch", "transformers", "safetensors"}
    assert "**failed**: 1 failed, 1 passed |" in tried_versions.PAGE.read_text()


def test_a_cell_that_cannot_be_run_has_the_reason_in_its_line(elsewhere):
    assert tried_versions.main("cell", "--because", "no such build") == 0
    assert "| `cell` |" in tried_versions.PAGE.read_text()
    assert "| not run: no such build |" in tried_versions.PAGE.read_text()
