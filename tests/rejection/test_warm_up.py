"""No kernel of verification compiles after its warm-up: later calls ask for kernels that it has asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KEYS = Path(__file__).with_name("keys.py")


@pytest.mark.full
def test_calls_of_every_shape_ask_for_no_kernel_that_warm_up_did_not() -> None:
    """1 to 256 requests, 0 to K drafts, with filters and without, of each kind, aligned and not, and their trees."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(KEYS)], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 11
    assert [each["added"] for each in found.values() if each["added"]] == []
    assert found["one_hot"]["warmed"] == {"row_stats_kernel": 2, "verdict_kernel": 2, "filter_rows_kernel": 1}
    of_trees = [sum(found.pop(name)["warmed"].values()) for name in list(found) if "trees" in name]
    assert max(of_trees) <= 16
    assert max(sum(each["warmed"].values()) for each in found.values()) <= 10
