"""`benchmarks/gpu.py` runs from end to end without a GPU: a tiny model, the same table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_smoke_run_prints_the_table_and_writes_every_figure(tmp_path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARK), "--smoke", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(output.read_text())
    model = result["models"]["smoke"]
    assert [(row["batch"], row["contender"]) for row in model["rows"]] == [
        (batch, name) for batch in (1, 2) for name in ("plain", "speculative", "transformers")
    ]
    assert all(len(row["tokens_per_second"]) == 2 and row["median"] > 0 for row in model["rows"])
    assert model["floor_tokens_per_second"] == result["copy_bandwidth"] / model["weight_bytes_per_step"]
    assert model["acceptance_length"] > 2, "drafts are spoiled one time in five"
    for text in ("of the floor", "step overhead at batch 1", "speculative", "goals"):
        assert text in done.stdout


def test_without_a_gpu_the_real_run_is_refused_with_a_hint():
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARK)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert "--smoke" in done.stderr
