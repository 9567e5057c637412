"""Images in the prompts of the real vLLM, in both of its model runners: a Qwen3-VL, whose positions have three axes.

vLLM needs torchvision for images, and on PyPI it has builds for CUDA only. What reads images is Python. So a folder
with the Python part is enough, whose name is in SPECDEC_TORCHVISION; `.ci/engines` makes it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import vision_target
from vision_target import END, IMAGE, START
from vllm_process import VllmProcess, job_of, with_interpreted_triton

TORCHVISION = os.environ.get("SPECDEC_TORCHVISION")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(TORCHVISION is None, reason="SPECDEC_TORCHVISION names no folder with torchvision"),
]

OPERATORS = Path(__file__).parent / "torchvision_operators"
WIDTH, HEIGHT, NUM_PLACEHOLDERS = 84, 56, 6  # placeholders of 28 x 28
COLOURS = ["red", "white"]
NO_CORPUS = {"proposer_config": {"suffix_decoding_max_cached_requests": 0}}
ENGINE = {
    "block_size": 32,  # vLLM's V2 takes no smaller ones on a CPU
    "async_scheduling": False,
    "enable_prefix_caching": False,  # V1 refuses draft KV beside it
    "limit_mm_per_prompt": {"image": 1, "video": 0},
}


@pytest.fixture(scope="module")
def target(vllm_target, tmp_path_factory):
    return vision_target.save(vllm_target, tmp_path_factory.mktemp("vision") / "target")


@pytest.fixture(scope="module", params=["V1", "V2"])
def run(request, target, batch, tmp_path_factory):
    """Run an engine on two prompts, once with an image of each colour before the text."""
    directory = tmp_path_factory.mktemp("vllm")
    runner = {"path": [], "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if request.param == "V2":
        runner = with_interpreted_triton(tmp_path_factory.mktemp("site"))
    runner["path"] += [str(OPERATORS), TORCHVISION]
    process = VllmProcess(directory / "log", **runner)
    prompts = [[START, IMAGE, END, *ids[:40]] for ids in batch[:2]]
    batches = [prompts] * len(COLOURS)

    def run(*args, **kwargs):
        job = job_of(target, prompts, *args, batches=batches, sampling={"max_tokens": 32}, **ENGINE, **kwargs)
        outcome = process.run(job | {"images": COLOURS, "image_size": (WIDTH, HEIGHT)}, directory)
        assert outcome["error"] is None, outcome["error"]
        assert outcome["v2"] == (request.param == "V2")
        return outcome

    yield run
    process.close()


@pytest.fixture(scope="module")
def plain(run):
    outputs = run()["outputs"]
    assert outputs[0] != outputs[1], "the target sees the image"
    return outputs


@pytest.fixture
def record(shown):
    """Note what a run showed."""

    def note(outcome):
        workers = [(report["pid"], report["propose_calls"]) for report in outcome["reports"]]
        version = outcome["version"].partition("+")[0]
        shown(f"vLLM {version}, {'V2' if outcome['v2'] else 'V1'}, CPU", "images in prompts", workers=workers)

    return note


@pytest.mark.parametrize(("method", "specdec"), [("ngram", {}), ("suffix", NO_CORPUS)])
def test_host_proposers_generate_what_plain_vllm_does_after_images(run, plain, record, method, specdec):
    outcome = run(method, specdec=specdec)
    assert outcome["outputs"] == plain
    assert outcome["reports"][0]["num_accepted_draft_tokens"] > 20
    record(outcome)


def test_a_proposer_reads_a_placeholder_for_each_part_of_an_image(run, plain):
    outcome = run("Configured", specdec={"method": "everywhere:Reader", "on_proposer_error": "raise"})
    assert outcome["outputs"] == plain
    assert outcome["events"]["start"] == 4
    assert outcome["events"][f"token {IMAGE}"] == 4 * NUM_PLACEHOLDERS
    assert outcome["events"][f"token {START}"] == outcome["events"][f"token {END}"] == 4


def test_a_network_that_reads_the_targets_states_drafts_after_images(run, plain, record, tiny_drafter):
    outcome = run("eagle3", specdec={"model": tiny_drafter("eagle3")})
    assert outcome["outputs"] == plain
    assert outcome["reports"][0]["errors"] == {}
    assert outcome["reports"][0]["num_accepted_draft_tokens"] > 20
    record(outcome)


def test_a_network_that_reads_tokens_alone_gets_no_such_prompts_and_says_so(run, plain, tiny_drafter):
    outcome = run("draft_model", specdec={"model": tiny_drafter("draft_model")})
    assert outcome["outputs"] == plain
    assert outcome["reports"][0]["num_draft_tokens"] == 0
    assert "SD-W281" in outcome["log"]
