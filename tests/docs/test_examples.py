"""The Python of the examples' READMEs runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.clean_environment import Environment

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOUND = [
    pytest.param(page.parent, block, id=f"{page.parent.name}-{number}")
    for page in sorted(EXAMPLES.glob("*/README.md"))
    for number, block in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize(("example", "block"), FOUND)
def test_a_block_runs_beside_the_sources_of_its_example(example, block, tmp_path):
    environment = Environment.create(tmp_path / "environment", with_checkout=True)
    environment.run("env", f"PYTHONPATH={example / 'src'}", "python", "-c", block, cwd=tmp_path)
