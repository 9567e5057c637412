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


def test_with_lora_adapters_vllm_takes_its_v1_runner(front):
    """The head of V2 looks up one adapter for each request, where drafts are verified in several rows."""
    assert front["lora"]["v2"] is False


def test_configurations_of_others_are_left_alone(front):
    assert front["plain"] == {"v2": True, "lookahead": 0, "asynchronous": True}
    assert front["other"] == {"v2": False, "lookahead": 0, "asynchronous": False}


def test_nothing_is_loaded_before_a_configuration_names_us_and_no_runner_after(front):
    assert front["host imports"] == []
    assert front["runners"] == []


def test_a_name_that_nobody_offers_stops_the_start_with_our_error(front):
    assert "SD-E101" in front["misspelt"]["error"]


def test_a_key_of_vllms_that_nobody_would_read_is_refused_with_what_to_write_instead(front):
    fixes = {
        "prompt_lookup_max": 'additional_config["specdec"]["proposer_config"]["prompt_lookup_max"]',
        "quantization": 'additional_config["specdec"]["quantization"]',
        "max_model_len": "drafts are made up to the target's length",
        "draft_tensor_parallel_size": "every worker has the whole draft network",
        "kv_cache_dtype": "vLLM's own drafters alone read it",
        "suffix_decoding_max_cached_requests": '["proposer_config"]["suffix_decoding_max_cached_requests"]',
        "parallel_drafting": "vLLM's own drafters alone read it",
    }
    assert set(front["ignored"]) == set(fixes)
    for key, outcome in front["ignored"].items():
        assert "SD-E215" in outcome["error"]
        assert f"{key}=" in outcome["error"]
        assert fixes[key] in outcome["error"]
    assert front["already so"] == front["ours"], "a key that asks for what is so already changes nothing"


def test_a_method_beside_our_class_is_refused_because_vllm_would_run_its_own(front):
    assert "SD-E215" in front["method beside"]["error"]
    assert 'vLLM would run its own method "ngram"' in front["method beside"]["error"]
    assert '"model": "specdec.adapters.vllm.NAME"' in front["another module"]["error"]
    assert "error" not in front["vLLM's own"], "another's speculation is left alone"


def test_an_unknown_vllm_runs_v1_and_is_refused_with_the_list_where_v2_is_asked_for(front):
    assert front["unknown vLLM"] == {"v2": False, "lookahead": 0, "asynchronous": False}
    assert "SD-W238" in front["log"]
    assert "SD-E238" in front["unknown vLLM, V2 forced"]["error"]
    assert "propose is gone" in front["unknown vLLM, V2 forced"]["error"]
