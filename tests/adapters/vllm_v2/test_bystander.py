"""A process with specdec beside vLLM whose user never asked for us: nothing of ours ends it. No vLLM is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

REGISTER = """
import logging
logging.basicConfig(level=logging.INFO)
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins", name="specdec")
point.load()()
print("vLLM goes on")
"""

BROKEN = {
    "an error of any kind": 'raise RuntimeError("a CUDA driver that does not answer")',
    "a vLLM without these classes": "",
    "classes of another shape": "class SpeculativeConfig: pass\nclass VllmConfig: pass",
    "a class that answers badly": (
        "class Meta(type):\n"
        "    def __getattr__(cls, name): raise KeyError(name)\n"
        "class SpeculativeConfig(metaclass=Meta): pass\n"
        "class VllmConfig(metaclass=Meta): pass"
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_nothing_that_goes_wrong_while_registering_reaches_vllm_and_it_is_logged(case, tmp_path):
    runner = tmp_path / "vllm" / "v1" / "worker" / "gpu" / "spec_decode"
    runner.mkdir(parents=True)
    (tmp_path / "vllm" / "config.py").write_text(BROKEN[case])
    (runner / "__init__.py").write_text("def init_speculator(): pass")
    done = subprocess.run(
        [sys.executable, "-c", REGISTER], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "vLLM goes on", done.stderr
    assert "specdec" in done.stderr, "the log says that our entry point does nothing"
