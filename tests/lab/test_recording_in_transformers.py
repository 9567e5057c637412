"""A recording made inside transformers is the one that the engine makes of the same target."""

import json
import shutil

import pytest
import torch
from recordings import LAYERS, Quiet, drafts_at, settings, shared

from specdec.core.registry import PluginSettings
from specdec.lab.recording import Recording
from specdec.lab.recording.in_transformers import TransformersSource
from specdec.lab.recording.recorder import record
from specdec.lab.replay.run import replay
from specdec.sdk import ConfigError


def test_text_probabilities_and_states_are_those_of_the_engine(tmp_path):
    record(settings(hidden_states=LAYERS), PluginSettings(), tmp_path / "x", Quiet(), TransformersSource)
    found, ours = Recording.open(tmp_path / "x"), shared()
    assert found.manifest.source == "transformers"
    for name in ("request_id", "token_ids", "past_token_ids", "finish_reason", "text"):
        assert [getattr(each, name) for each in found] == [getattr(each, name) for each in ours]
    for theirs, mine in zip(found, ours, strict=True):
        assert torch.equal(theirs.top_ids[:, :5], mine.top_ids[:, :5])
        assert torch.allclose(theirs.tail_mass, mine.tail_mass, atol=1e-4)
        states = found.hidden_states(theirs.request_id)
        assert torch.allclose(states, ours.hidden_states(mine.request_id)[: len(states)], atol=1e-3)
    asked = {"model": "tiny/eagle3", "num_speculative_tokens": 3}
    first, second = (drafts_at(replay(recording, asked)) for recording in (found, ours))
    assert first == second


def test_a_penalty_of_the_checkpoint_changes_no_recorded_text(tmp_path):
    target = shutil.copytree(shared().manifest.target["checkpoint_dir"], tmp_path / "target")
    file = target / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 1.8, "min_new_tokens": 24}))
    asked = settings(num_prompts=1)
    asked = asked.replace(engine=asked.engine.replace(model=str(target)))
    record(asked, PluginSettings(), tmp_path / "x", Quiet(), TransformersSource)
    (found,) = Recording.open(tmp_path / "x")
    assert found.token_ids == next(each.token_ids for each in shared() if each.request_id == found.request_id)


def test_sampling_inside_transformers_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="only greedy") as raised:
        record(settings(temperature=0.5), PluginSettings(), tmp_path / "x", Quiet(), TransformersSource)
    assert raised.value.code == "SD-E251"
