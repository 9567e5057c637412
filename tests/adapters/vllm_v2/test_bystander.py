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


GRAMMARS = """
class StructuredOutputManager:
    def validate_tokens(self, request, spec_tokens): return spec_tokens
    def grammar_bitmask(self, requests, structured_output_request_ids, scheduled_spec_decode_tokens): return None
"""

WHOLE = """
class SpeculativeConfig:
    def __post_init__(self): pass
    def use_eagle_block_drop(self): return False
class VllmConfig:
    def __post_init__(self): pass
    @property
    def num_lookahead_tokens(self): return 7
    def _get_v2_model_runner_unsupported_features(self): return []
"""

ASKED = """
from types import SimpleNamespace
from vllm.config import SpeculativeConfig
from specdec.adapters.vllm_v2.plugin import DROPS
for told in ({}, {DROPS: True}):
    print(SpeculativeConfig.use_eagle_block_drop(SimpleNamespace(**told)))
"""


def run(code, config, folder):
    """A process beside a vLLM with this module `vllm.config`."""
    runner = folder / "vllm" / "v1" / "worker" / "gpu" / "spec_decode"
    runner.mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()  # a package without it gives way to a vLLM that is installed
    (folder / "vllm" / "config.py").write_text(config)
    (runner / "__init__.py").write_text("def init_speculator(): pass")
    (folder / "vllm" / "v1" / "structured_output.py").write_text(GRAMMARS)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_vllm_that_has_these_classes_is_wrapped(tmp_path):
    done = run(REGISTER + ASKED, WHOLE, tmp_path)
    assert done.stdout.split("\n")[:3] == ["vLLM goes on", "False", "True"], done.stderr


@pytest.mark.parametrize("case", BROKEN)
def test_nothing_that_goes_wrong_while_registering_reaches_vllm_and_it_is_logged(case, tmp_path):
    done = run(REGISTER, BROKEN[case], tmp_path)
    assert done.stdout.strip() == "vLLM goes on", done.stderr
    assert "specdec" in done.stderr, "the log says that our entry point does nothing"
