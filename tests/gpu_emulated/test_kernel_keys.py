"""No kernel compiles while requests wait: all are asked for at an engine's start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kernel_keys.py")
QUICK = [("plain", "greedy")]
OTHERS = [
    ("eagle", "dense"),
    ("eagle3", "sparse"),
    ("dflash", "greedy"),
    ("medusa", "sparse"),
    ("draft_model", "greedy"),
    ("mtp", "sparse"),
    ("hybrid-plain", "greedy"),
    ("hybrid-mtp", "greedy"),
]
TREES = [
    ("suffix", "tree"),
    ("medusa", "tree"),
    ("draft_model", "tree"),
    ("eagle3", "drawn"),
    ("dflash", "drawn"),
]
"""An engine that draws trees grows trees of likeliest nodes as well, in steps of greedy requests."""


@pytest.mark.full
@pytest.mark.parametrize("cases", [QUICK, OTHERS, TREES], ids=["quick", "draft networks and hybrids", "trees"])
def test_serving_asks_for_no_kernel_that_the_start_did_not(cases):
    """Requests come and go; recorded, and unrecorded, where each number of tokens is launched."""
    found = printed(["-".join(case) for case in cases])
    assert len(found) == 2 * len(cases)
    assert [each for each in found if each["added"]] == []
    for each in found:
        tiles = each["warmed"]["attend_pages_kernel"]
        assert tiles % 3 == 0, "tiles of 16, 32 and 64 rows, for each kind of layer, with parts and without"
        assert {"join_parts_kernel", "rms_norm_kernel"} <= each["warmed"].keys()
        assert (cases is TREES) == ({"tree_masks_kernel", "move_paths_kernel"} <= each["warmed"].keys())


def printed(cases):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    helpers = [str(SCRIPT.parents[1] / "helpers"), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *cases],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(helpers)},
        check=False,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
