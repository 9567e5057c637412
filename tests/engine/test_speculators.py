"""A drafter's checkpoint given as the model brings its target along."""

from __future__ import annotations

import json
import shutil

import pytest
from engine_helpers import GREEDY
from inside import host_of, plugin_of

from specdec import LLM
from specdec.core.engine.verifier_checkpoint import with_verifier
from specdec.sdk import ConfigError
from specdec.sdk.packaged import packaged


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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A drafter of the hub, as the cache keeps it; returns (its id, the snapshot's directory)."""
    repository = tmp_path / "hub" / "models--org--drafter"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for file in packaged("tiny/dflash").iterdir():
        shutil.copy(file, snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "tiny"
    (snapshot / "config.json").write_text(json.dumps(config))
    for module in ("huggingface_hub.constants", "transformers.utils.hub"):
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.setattr(f"{module}.{name}", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "org/drafter", snapshot


def test_a_hub_id_in_the_cache_brings_its_target_along(hub):
    name, snapshot = hub
    assert with_verifier(name, None) == ("tiny", {"model": name})
    assert with_verifier(name, {"model": str(snapshot)})[0] == "tiny"
    by_id, by_folder = LLM(name, max_model_len=128), LLM(snapshot, max_model_len=128)
    assert host_of(by_id) is not None
    prompt = ["def f(x):"]
    texts = [llm.generate(prompt, GREEDY.replace(max_tokens=8))[0].outputs[0].text for llm in (by_id, by_folder)]
    assert texts[0] == texts[1]


def test_a_configuration_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="SD-E143"):
        with_verifier(tmp_path, None)


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
    assert plugin_of(alone).name == "eagle3"
