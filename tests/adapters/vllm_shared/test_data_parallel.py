"""Two data-parallel ranks of vLLM's serving engine, each with a proposer of its own, or with one that they share."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from drafter_servers import served
from vllm_process import ENGINE, HERE, TIME_LIMIT, environment_of, with_interpreted_triton

pytestmark = pytest.mark.full

NUM_TOKENS = 24


def greedy(model, ids):
    """What transformers generates."""
    output = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


@pytest.fixture
def drafter(request, tmp_path):
    """The proposer's name, its options, and what it shows beside two ranks."""
    if request.param == "own":
        yield "ngram", {}, []
        return
    with served("ngram", f"ipc://{tmp_path}/socket") as (_, address):
        yield "remote", {"address": address}, ["a drafter that a server runs"]


@pytest.mark.parametrize(("runner", "drafter"), [("V1", "own"), ("V2", "own"), ("V2", "shared")], indirect=["drafter"])
def test_two_data_parallel_ranks_draft_and_generate_what_one_engine_does(
    tmp_path, vllm_target, prompts, model, shown, runner, drafter
):
    method, options, capabilities = drafter
    texts = [ids[0].tolist() for ids in prompts] * 2
    settings = {"model": str(vllm_target), "data_parallel_size": 2, "block_size": 32, "disable_log_stats": False}
    speculative = {"model": f"specdec.adapters.vllm.{method}", "num_speculative_tokens": 4}
    settings["additional_config"] = {"specdec": {"proposer_config": options}}
    job = {
        "engine": ENGINE | settings | {"speculative_config": speculative, "async_scheduling": False},
        "prompts": texts,
        "sampling": {"temperature": 0, "max_tokens": NUM_TOKENS},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    (site := tmp_path / "site").mkdir()
    more = with_interpreted_triton(site) if runner == "V2" else {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    environment = environment_of(False, more.pop("path", ()), more)
    command = [sys.executable, HERE / "run_data_parallel.py", tmp_path]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["v2"] == (runner == "V2")
    assert result["outputs"] == [greedy(model, ids) for ids in prompts] * 2
    assert set(result["accepted"]) == {"0", "1"}
    assert min(result["accepted"].values()) > 0
    shown(f"vLLM {result['version'].partition('+')[0]}, {runner}, CPU", "two data-parallel ranks", *capabilities)
