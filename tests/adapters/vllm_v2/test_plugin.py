"""The entry point in vLLM's first process: whose configurations it changes, and what it loads there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_process import environment_of

pytestmark = pytest.mark.full

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def front(shim, vllm_target, tmp_path_factory):
    """What configure.py found, and what was printed."""
    out = tmp_path_factory.mktemp("front") / "found.json"
    environment = {name: value for name, value in shim.items() if name != "path"}
    done = subprocess.run(
        [sys.executable, HERE / "configure.py", str(vllm_target), str(out)],
        env=environment_of(True, shim["path"], environment),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert out.is_file(), done.stderr[-4000:]
    return json.loads(out.read_text()) | {"log": done.stdout + done.stderr}


def test_a_proposer_of_ours_runs_in_v2_with_asynchronous_scheduling(front):
    assert front["ours"] == {"v2": True, "lookahead": 0, "asynchronous": True}
    assert front["draft kv"] == {"v2": True, "lookahead": 1, "asynchronous": True}


def test_configurations_of_others_are_left_alone(front):
    assert front["plain"] == {"v2": True, "lookahead": 0, "asynchronous": True}
    assert front["other"] == {"v2": False, "lookahead": 0, "asynchronous": False}


def test_nothing_is_loaded_before_a_configuration_names_us_and_no_runner_after(front):
    assert front["host imports"] == []
    assert front["runners"] == []


def test_a_name_that_nobody_offers_stops_the_start_with_our_error(front):
    assert "SD-E101" in front["misspelt"]["error"]


def test_an_unknown_vllm_runs_v1_and_is_refused_with_the_list_where_v2_is_asked_for(front):
    assert front["unknown vLLM"] == {"v2": False, "lookahead": 0, "asynchronous": False}
    assert "SD-W238" in front["log"]
    assert "SD-E238" in front["unknown vLLM, V2 forced"]["error"]
    assert "propose is gone" in front["unknown vLLM, V2 forced"]["error"]
