"""Recordings of structured output: what was asked for is kept, a replay drafts under it, why knows what it refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from recordings import Quiet, live_steps, make, settings

from specdec.core.registry import PluginSettings
from specdec.lab.comparison.variants import Variant
from specdec.lab.recording import RecordingWriter
from specdec.lab.recording.recorder import record
from specdec.lab.replay.run import replay
from specdec.lab.why import run_why
from specdec.sdk import ConfigError

FORCED = {"method": "forced", "num_speculative_tokens": 6}
NGRAM = {"method": "ngram", "num_speculative_tokens": 6}


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A record, and a tool call, which ends by itself."""
    return make(tmp_path_factory.mktemp("x") / "tools", dataset_name="tools", num_prompts=2, output_len=100)


def test_the_form_of_each_request_is_kept_and_what_ends_is_followed_freely(recording):
    assert [each.structured_outputs.json_schema["type"] for each in recording] == ["object", "object"]
    assert "stop" in {each.finish_reason for each in recording}
    assert all(each.past_token_ids for each in recording if each.finish_reason == "stop")
    assert all(torch.isfinite(each.token_logprobs).all() for each in recording)


@pytest.mark.parametrize("config", [FORCED, NGRAM], ids=["forced", "ngram"])
def test_a_replay_drafts_what_a_live_run_drafts(recording, config):
    replayed = replay(recording, config)
    live, _ = live_steps(recording, config)
    assert replayed.steps == live
    assert replayed.acceptance.num_accepted_tokens > 0
    assert replayed.outputs == {each.request_id: each.token_ids for each in recording}


def test_why_knows_which_drafts_the_grammar_refused(recording):
    result = run_why(recording.folder, [Variant("ngram", NGRAM), Variant("forced", FORCED)], PluginSettings(), Quiet())
    ngram, forced = (row["losses"] for row in result["rows"])
    assert ngram["misses_refused_by_grammars"] > 0
    assert ngram["lost_to_refused_misses"] >= ngram["misses_refused_by_grammars"]
    assert forced["misses_refused_by_grammars"] == 0, "it drafts what the grammar allows"
    misses = [miss for row in result["rows"][0]["requests"] for miss in row["misses"]]
    assert sum(miss["refused_by_grammar"] for miss in misses) == ngram["misses_refused_by_grammars"] < len(misses)


def test_a_form_that_is_none_is_a_damaged_recording(recording, tmp_path):
    writer = RecordingWriter(tmp_path / "x", recording.manifest)
    first, _ = recording
    broken = first.structured_outputs.model_copy(update={"regex": "a"})
    writer.add(replace(first, structured_outputs=broken))
    writer.finish()
    with pytest.raises(ConfigError, match="structured_outputs has unusable values") as raised:
        list(type(recording).open(tmp_path / "x"))
    assert raised.value.code == "SD-E244"


def test_other_engines_are_asked_for_no_form(tmp_path):
    from specdec.lab.recording.in_transformers import TransformersSource

    with pytest.raises(ConfigError, match="not recorded there") as raised:
        record(settings(dataset_name="tools"), PluginSettings(), tmp_path / "x", Quiet(), TransformersSource)
    assert raised.value.code == "SD-E162"
