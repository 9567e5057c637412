"""A head's agreement with its target, and the trainer in examples/."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import drafts_at, make, shared

from specdec.core.model.model_support import locate_model
from specdec.core.registry import PluginSettings
from specdec.lab.recording import Recording
from specdec.lab.replay.run import replay
from specdec.lab.training.agreement import TRAINERS_FILE, _as_recorded, head_agreement
from specdec.lab.training.data import export_data

HEAD = {"model": "tiny/eagle3", "num_speculative_tokens": 3}
TRAINER = Path(__file__).parents[2] / "examples" / "train-head" / "train.py"


@pytest.fixture(scope="module")
def rows():
    return {(each.how, each.data): each.depths for each in head_agreement(shared(), shared(), HEAD, PluginSettings())}


def test_a_teacher_forced_replay_drafts_at_every_position():
    recording = shared()
    replayed = replay(recording, HEAD, teacher_forced=True)
    assert dict(replayed.outputs) == {each.request_id: each.token_ids for each in recording}
    for request in recording:
        steps = replayed.steps[request.request_id]
        assert [step.num_committed for step in steps] == [1] * len(request.token_ids)
        assert all(step.num_accepted == 0 for step in steps)


def test_drafts_at_a_position_are_those_of_an_ordinary_replay():
    forced = drafts_at(replay(shared(), HEAD, teacher_forced=True))
    for place, drafts in drafts_at(replay(shared(), HEAD)).items():
        assert drafts == forced[place][: len(drafts)]


@pytest.mark.slow
def test_replay_and_engine_agree_by_depth(rows):
    assert rows["replay", "held-out"] == rows["engine", "held-out"]
    assert rows["teacher-forced", "training"] == rows["teacher-forced", "held-out"]
    assert all(0.3 < share < 1 for share in rows["teacher-forced", "training"])


def test_a_head_without_its_trainers_figures_has_no_row_of_them(rows):
    assert {how for how, _ in rows} == {"teacher-forced", "replay", "engine"}


def test_a_recorded_request_of_one_token_is_replayed_with_a_head(tmp_path):
    recording = make(tmp_path / "x", num_prompts=2, output_len=1, hidden_states=(2, 4, 5, "final"))
    assert [len(tokens) for tokens in replay(recording, HEAD).outputs.values()] == [1, 1]


def test_the_live_engine_has_the_recorded_ones_settings_but_no_trust_in_what_a_checkpoint_runs():
    recording = shared()
    asked = {"dtype": "bfloat16", "cpu_kernels": "torch", "quantization": "int8_weight_only", "block_size": 8}
    engine = recording.manifest.engine | asked | {"trust_remote_code": True, "num_kv_blocks": 1}
    config = _as_recorded(Recording(recording.folder, recording.manifest.replace(engine=engine)), None)
    assert {name: getattr(config, name) for name in asked} == asked
    assert (config.max_num_seqs, config.max_model_len) == (2, engine["max_model_len"])
    assert (config.device, config.trust_remote_code, config.num_kv_blocks) == ("auto", False, None)


@pytest.mark.full
@pytest.mark.parametrize("head", ["eagle3", "dflash"])
def test_a_head_that_is_trained_on_a_recording_is_served_as_it_was_trained(tmp_path, head):
    recording = make(tmp_path / "x", num_prompts=12, output_len=48, max_num_seqs=4, hidden_states=(2, 4, 5, 8, "final"))
    export_data(recording, tmp_path / "data", "speculators", layers=(2, 4, 5))
    target, folder = locate_model("tiny"), tmp_path / "head"
    asked = ["--target", target, "--layers", "2,4,5", "--steps", "60"]
    asked += ["--held-out", tmp_path / "data", "--mask-token-id", "4084"]
    subprocess.run([sys.executable, TRAINER, head, tmp_path / "data", folder, *asked], check=True, cwd=tmp_path)
    said = json.loads((folder / TRAINERS_FILE).read_text())["held_out"]
    config = {"model": str(folder), "num_speculative_tokens": 3}
    rows = head_agreement(recording, recording, config, PluginSettings())
    trained, served = (next(each.depths for each in rows if each.how == how) for how in ("trainer", "teacher-forced"))
    assert list(trained) == said
    assert trained[0] > 0.35, "it has learnt these texts"
    assert served == pytest.approx(trained[:3], abs=0.06)  # bf16 weights, and the places past the recorded states
    assert replay(recording, config).acceptance.mean_acceptance_length > 1.4
