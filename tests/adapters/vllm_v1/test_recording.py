"""A recording made inside vLLM is the one that our engine makes of the same target."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.core.config.engine_config import EngineConfig
from specdec.core.registry import PluginSettings
from specdec.lab.comparison.variants import Variant
from specdec.lab.datasets import load_dataset
from specdec.lab.progress import NoProgress
from specdec.lab.recording import Recording
from specdec.lab.recording.recorder import record
from specdec.lab.recording.settings import RecordSettings
from specdec.lab.replay.run import replay
from specdec.lab.why.run import run_why

pytestmark = pytest.mark.full

LAYERS = (2, 4, 5, "final")
EQUAL = ("request_id", "number", "prompt", "prompt_token_ids", "token_ids", "past_token_ids", "finish_reason", "text")
QUICK = {"enforce_eager": True, "distributed_executor_backend": "uni"}


def recorded_in_vllm(target, folder, *, seconds=400, **more):
    """`specdec record` in a process of its own, ended after so many seconds."""
    options = {"num-prompts": 3, "output-len": 40, "max-concurrency": 2, "hidden-states": "2,4,5,final"}
    options |= {"vllm": json.dumps(QUICK)} | more
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", "specdec", "record", str(target), "-o", str(folder), "--engine", "vllm", *flags]
    return subprocess.run(
        [*command, "--full-logits"], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.fixture(scope="module")
def ending_target(vllm_target, tmp_path_factory):
    """The target whose texts end at tokens that it says: it was trained on texts without an end."""
    directory = tmp_path_factory.mktemp("ending")
    for file in vllm_target.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    (directory / "generation_config.json").unlink()
    prompt = load_dataset("packaged", None, PluginSettings())[0].prompt
    (output,) = LLM(vllm_target).generate([prompt], SamplingParams(temperature=0, max_tokens=13))
    settings = {"eos_token_id": [2, output.outputs[0].token_ids[12]]}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def both(ending_target, tmp_path_factory):
    """The recording from inside vLLM, and ours."""
    folder = tmp_path_factory.mktemp("recordings")
    done = recorded_in_vllm(ending_target, folder / "vllm")
    assert done.returncode == 0, done.stderr[-4000:]
    settings = RecordSettings(
        engine=EngineConfig(model=ending_target, max_num_seqs=2),
        num_prompts=3,
        output_len=40,
        hidden_states=LAYERS,
        full_logits=True,
        measure_cost=False,
    )
    record(settings, PluginSettings(), folder / "specdec", NoProgress())
    return Recording.open(folder / "vllm"), Recording.open(folder / "specdec")


def test_texts_probabilities_and_states_are_those_of_our_engine(both):
    theirs, ours = both
    assert theirs.manifest.source == "vllm"
    assert theirs.manifest.complete
    for name in EQUAL:
        assert [getattr(each, name) for each in theirs] == [getattr(each, name) for each in ours], name
    assert any(each.past_token_ids for each in ours)
    for a, b in zip(theirs, ours, strict=True):
        assert torch.equal(a.top_ids[:, :3], b.top_ids[:, :3])
        for name in ("top_logprobs", "token_logprobs", "tail_mass", "entropy"):
            assert torch.allclose(getattr(a, name), getattr(b, name), atol=1e-3), name
        assert torch.allclose(theirs.logits(a.request_id), ours.logits(b.request_id), atol=1e-3)
        states, expected = (each.hidden_states(a.request_id) for each in both)
        assert states.shape == expected.shape
        assert torch.allclose(states, expected, atol=1e-3)


COMPACT = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


def test_forms_are_recorded_as_our_engine_records_them(vllm_target, tmp_path):
    done = recorded_in_vllm(vllm_target, tmp_path / "vllm", dataset="tools", vllm=json.dumps(QUICK | COMPACT))
    assert done.returncode == 0, done.stderr[-4000:]
    settings = RecordSettings(
        engine=EngineConfig(model=vllm_target, max_num_seqs=2),
        dataset_name="tools",
        num_prompts=3,
        output_len=40,
        full_logits=True,
        measure_cost=False,
    )
    record(settings, PluginSettings(), tmp_path / "specdec", NoProgress())
    theirs, ours = Recording.open(tmp_path / "vllm"), Recording.open(tmp_path / "specdec")
    for name in (*EQUAL, "structured_outputs"):
        assert [getattr(each, name) for each in theirs] == [getattr(each, name) for each in ours], name
    special = AutoTokenizer.from_pretrained(vllm_target).all_special_ids  # vLLM takes them for text, and we bar them
    for each in ours:
        assert each.structured_outputs is not None
        allowed = [source.logits(each.request_id) > -math.inf for source in (theirs, ours)]
        differ = (allowed[0] != allowed[1]).any(0).nonzero().flatten().tolist()
        assert set(differ) <= set(special)
    asked = [Variant("ngram", {"method": "ngram", "num_speculative_tokens": 4})]
    rows = [run_why(each.folder, asked, PluginSettings(), NoProgress())["rows"][0] for each in (theirs, ours)]
    assert rows[0]["losses"] == rows[1]["losses"]


def test_whitespace_that_vllm_would_put_otherwise_is_refused(vllm_target, tmp_path):
    done = recorded_in_vllm(vllm_target, tmp_path / "x", dataset="tools")
    assert done.returncode == 2
    assert "SD-E280" in done.stderr
    assert json.dumps(COMPACT) in done.stderr


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_a_replay_drafts_and_accepts_the_same(both, tiny_drafter, method):
    asked = {"method": method, "num_speculative_tokens": 4}
    asked |= {"model": tiny_drafter(method)} if method == "eagle3" else {}
    theirs, ours = (replay(recording, asked).steps for recording in both)
    assert theirs == ours
    assert replay(both[0], asked).acceptance.num_accepted_tokens > 5


def test_arguments_that_recording_decides_and_unknown_ones_are_refused(vllm_target, tmp_path):
    for given in ({"enable_prefix_caching": True}, {"tensor_paralel_size": 2}):
        done = recorded_in_vllm(vllm_target, tmp_path / "x", vllm=json.dumps(given))
        assert done.returncode == 2
        assert "SD-E280" in done.stderr
        assert next(iter(given)) in done.stderr
