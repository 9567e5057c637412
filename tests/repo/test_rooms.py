"""The forms of devices stand in rooms that nothing imports: where these are closed everything works, more slowly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLICE = [
    "tests/engine/test_draft_store.py",
    "tests/engine/test_seeded_sampling.py",
    "tests/engine/test_greedy_equality.py::test_greedy_equals_transformers",
    "tests/rejection/test_exact_distribution.py",
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "proposer_config": {"prompt_lookup_min": 1}}
EAGLE3 = {"model": "tiny/eagle3", "num_speculative_tokens": 3}


def run_closed(*arguments: str) -> str:
    path = os.pathsep.join(["tests/helpers", os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_a_slice_of_the_suite_passes() -> None:
    said = run_closed("pytest", "-p", "closed_rooms", "-n", "0", "-q", *SLICE, "-m", "not full and not gpu")
    assert " passed" in said
    assert "failed" not in said


@pytest.mark.full
@pytest.mark.parametrize("speculation", [NGRAM, EAGLE3], ids=["ngram", "eagle3"])
def test_a_benchmark_runs_and_drafts_are_accepted(speculation: dict[str, object]) -> None:
    asked = ["--num-prompts", "2", "--output-len", "24", "--repeat", "1", "--json"]
    result = json.loads(run_closed("closed_rooms", "bench", "tiny", "-sc", json.dumps(speculation), *asked))
    assert result["configuration"]["text_equality"]["level"] == "ties", "PyTorch computes"
    assert result["num_accepted_tokens"] > 0
