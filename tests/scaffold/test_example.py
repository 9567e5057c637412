"""The example package, imported from its sources. From its wheel: test_every_kind.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.clean_environment import Environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "specdec-plugin-retrieval"


@pytest.mark.full
def test_the_example_passes_its_own_tests(tmp_path):
    environment = Environment.create(tmp_path / "environment", with_checkout=True)
    tests = [str(EXAMPLE / "tests" / name) for name in ("test_index.py", "test_proposer.py")]
    found = f"PYTHONPATH={EXAMPLE / 'src'}"
    told = environment.run(
        "env", found, "pytest", "-q", "-p", "no:cacheprovider", "-k", "not gains", *tests, cwd=tmp_path
    )
    assert " passed" in told
