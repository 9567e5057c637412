"""The site builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "reference" / "contract.html").is_file()
