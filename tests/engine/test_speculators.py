"""A drafter's checkpoint given as the model brings its target along."""

from __future__ import annotations

import json

import pytest
from engine_helpers import GREEDY

from specdec import LLM
from specdec.core.speculators import with_verifier
from specdec.sdk import ConfigError


@pytest.fixture
def drafter(tmp_path):
    def write(verifier="tiny", tokens=5, **fields):
        config = {"speculators_model_type": "x", "speculators_config": {"verifier": {"name_or_path": verifier}}}
        if tokens is not None:
            config["speculators_config"]["proposal_methods"] = [{"speculative_tokens": tokens}]
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        return tmp_path

    return write


def test_target_comes_from_the_checkpoint(drafter):
    path = drafter()
    assert with_verifier(path, None) == ("tiny", {"model": str(path)})


def test_relative_target_is_found_from_the_checkpoint(drafter, tmp_path):
    assert with_verifier(drafter(verifier="../target"), None)[0] == str(tmp_path.parent / "target")


@pytest.mark.parametrize("asked", [{"num_speculative_tokens": 2, "dtype": "float32"}, '{"num_speculative_tokens": 2}'])
def test_what_the_user_wrote_wins(drafter, asked):
    model, config = with_verifier(drafter(), asked)
    assert (model, config["num_speculative_tokens"]) == ("tiny", 2)
    assert "dtype" not in asked or config["dtype"] == "float32"


def test_the_same_checkpoint_may_be_named_twice(drafter):
    path = drafter()
    assert with_verifier(path, {"model": str(path), "method": "x"})[1]["method"] == "x"


def test_another_checkpoint_in_the_config_is_refused(drafter, tmp_path):
    path = drafter()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="SD-E136") as refusal:
        with_verifier(path, {"model": str(tmp_path / "other")})
    assert str(path) in str(refusal.value)
    assert "other" in str(refusal.value)


def test_checkpoint_that_names_no_target_is_refused_with_the_way_to_run_it(drafter):
    path = drafter(verifier=None)
    with pytest.raises(ConfigError, match="name_or_path") as refusal:
        with_verifier(path, None)
    assert f'speculative_config={{"model": "{path}"' in str(refusal.value)


def test_ordinary_models_are_left_alone(target_path):
    assert with_verifier("tiny", None) == ("tiny", None)
    asked = {"method": "x"}
    assert with_verifier(target_path, asked) == (target_path, asked)


def test_packaged_drafter_runs_with_its_target(prompts):
    alone = LLM("tiny/eagle3", max_model_len=256)
    plain = LLM("tiny", max_model_len=256)
    asked = [{"prompt_token_ids": prompt[:40]} for prompt in prompts[:2]]
    found = [llm.generate(asked, GREEDY) for llm in (alone, plain)]
    assert [out.outputs[0].token_ids for out in found[0]] == [out.outputs[0].token_ids for out in found[1]]
    assert alone.engine.parts.guest.plugin.name == "eagle3"
