"""What a user writes to vLLM, and which plans are refused."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from transformers import dynamic_module_utils

import specdec.adapters.vllm as selector
from specdec.adapters.vllm_shared import refused_drafts
from specdec.adapters.vllm_shared.plan import refuse_for_v1, refuse_needs, refuse_plan, withheld_by
from specdec.adapters.vllm_shared.prepare import load_tokenizer
from specdec.adapters.vllm_shared.settings import read_settings
from specdec.sdk import ConfigError, Needs, Refusal
from specdec.sdk.extensions import DraftKV, Grammars, NewWeights, TargetKV, TargetLayers
from specdec.sdk.packaged import packaged


def read(method="ngram", section=None, k=5, sample="greedy"):
    return read_settings(method, {"specdec": section} if section is not None else {}, k, sample)


def test_a_name_alone_is_enough_and_a_failing_proposer_is_disabled_by_default():
    config = read()
    assert (config.method, config.num_speculative_tokens) == ("ngram", 5)
    assert config.on_proposer_error == "disable"


def test_options_checkpoint_and_policy_stand_in_additional_config():
    section = {"model": "some/drafter", "on_proposer_error": "raise", "proposer_config": {"a": 1}}
    config = read("eagle3", section, sample="probabilistic")
    assert (config.method, config.model, config.on_proposer_error) == ("eagle3", "some/drafter", "raise")
    assert (config.proposer_config, config.draft_sample_method) == ({"a": 1}, "probabilistic")


def test_a_class_path_stands_in_additional_config():
    assert read(None, {"method": "package.module:Class"}).method == "package.module:Class"


@pytest.mark.parametrize(
    ("method", "section", "code"),
    [
        ("ngram", {"num_speculative_tokens": 3}, "SD-E196"),
        ("ngram", {"draft_sample_method": "greedy"}, "SD-E196"),
        ("ngram", {"method": "suffix"}, "SD-E196"),
        (None, {}, "SD-E133"),
        ("ngram", ["proposer_config"], "SD-E132"),
        ("ngram", {"on_proposer_error": "ignore"}, "SD-E132"),
    ],
)
def test_what_is_said_twice_or_wrongly_is_refused_by_code(method, section, code):
    with pytest.raises(ConfigError) as error:
        read(method, section)
    assert error.value.code == code


def test_the_selector_makes_a_class_per_name_and_imports_no_vllm():
    assert selector.some_name.method == "some_name"
    assert selector.Configured.method is None
    assert selector.some_name.__module__ == selector.__name__
    with pytest.raises(AttributeError):
        _ = selector.__path__


KEEPS_KV = Needs(extensions=(DraftKV(num_layers=1, num_heads=1, head_dim=8),))


def plan(**changes):
    values = {
        "scheduler_config.async_scheduling": False,
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.data_parallel_size": 1,
        "model_config.is_hybrid": False,
        "model_config.is_attention_free": False,
        "model_config.enable_prompt_embeds": False,
        "model_config.enable_sleep_mode": False,
        "model_config.skip_tokenizer_init": False,
        "structured_outputs_config.backend": "auto",
        "structured_outputs_config.reasoning_parser": "",
        "structured_outputs_config.enable_in_reasoning": False,
        "speculative_config.rejection_sample_method": "standard",
        "speculative_config.draft_sample_method": "greedy",
        "additional_config": {},
        "cache_config.enable_prefix_caching": False,
        "device_config.device": "cpu",
        "kv_transfer_config": None,
    } | changes
    config = SimpleNamespace()
    for name, value in values.items():
        *section, field = name.split(".")
        holder = config
        for part in section:
            holder.__dict__.setdefault(part, SimpleNamespace())
            holder = getattr(holder, part)
        setattr(holder, field, value)
    return config


def test_the_usual_plan_is_taken():
    refuse_plan(plan())
    refuse_needs(KEEPS_KV, plan(**{"cache_config.enable_prefix_caching": True}))
    refuse_for_v1(KEEPS_KV, plan())
    refuse_for_v1(Needs(), plan(**{"cache_config.enable_prefix_caching": True}))
    drawn = {"speculative_config.draft_sample_method": "probabilistic"}
    refuse_for_v1(Needs(), plan(**drawn, additional_config={refused_drafts.KEY: True}))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("model_config.is_hybrid", True, "specdec.LLM"),
        ("model_config.is_attention_free", True, "specdec.LLM"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size=1"),
        ("model_config.enable_prompt_embeds", True, "enable_prompt_embeds=False"),
        ("speculative_config.rejection_sample_method", "synthetic", "standard"),
    ],
)
def test_a_plan_in_which_no_proposer_can_run_is_refused_with_what_would_work(field, value, reason):
    with pytest.raises(Refusal, match=reason):
        refuse_plan(plan(**{field: value}))


def test_data_parallel_ranks_of_a_dense_target_are_independent_and_those_of_experts_are_refused():
    refuse_plan(plan(**{"parallel_config.data_parallel_size": 2, "model_config.is_moe": False}))
    with pytest.raises(Refusal, match="one engine per replica"):
        refuse_plan(plan(**{"parallel_config.data_parallel_size": 2, "model_config.is_moe": True}))


@pytest.mark.parametrize(
    ("refuse", "field", "value", "reason"),
    [
        (refuse_for_v1, "cache_config.enable_prefix_caching", True, "enable_prefix_caching=False"),
        (refuse_for_v1, "scheduler_config.async_scheduling", True, "async_scheduling=False"),
        (refuse_for_v1, "speculative_config.draft_sample_method", "probabilistic", "VLLM_PLUGINS"),
    ],
)
def test_a_plan_that_a_runner_or_a_need_cannot_live_in_is_refused(refuse, field, value, reason):
    with pytest.raises(Refusal, match=reason):
        refuse(KEEPS_KV, plan(**{field: value}))


def test_what_sleep_would_throw_away_is_refused():
    asleep = plan(**{"model_config.enable_sleep_mode": True})
    refuse_needs(Needs(), asleep)
    with pytest.raises(Refusal, match=r"(?s)level 2.*enable_sleep_mode=False"):
        refuse_needs(Needs(placement="device"), asleep)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("cache_config.enable_prefix_caching", True, "whole_prompt.*enable_prefix_caching=False"),
        ("kv_transfer_config", object(), "whole_prompt.*no KV connector"),
    ],
)
def test_a_proposer_that_has_to_see_whole_prompts_is_refused_where_they_may_begin_late(field, value, reason):
    refuse_needs(Needs(whole_prompt=True), plan())
    refuse_needs(Needs(), plan(**{field: value}))
    with pytest.raises(Refusal, match=f"(?s){reason}"):
        refuse_needs(Needs(whole_prompt=True), plan(**{field: value}))


def test_what_vllm_does_not_show_of_its_target_is_withheld_with_the_reason():
    withheld = withheld_by(plan())
    assert withheld.keys() == {TargetKV.id, TargetLayers.id, NewWeights.id}
    assert "vLLM's cache" in withheld[TargetKV.id][0]
    assert "specdec.LLM" in withheld[TargetLayers.id][1]


def test_a_tokenizer_that_brings_code_is_loaded_if_vllm_was_told_to_trust_it(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "target"
    folder.mkdir()
    shutil.copy(packaged("tiny") / "tokenizer.json", folder)
    (folder / "config.json").write_text('{"model_type": "of its own"}')
    says = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(says))
    (folder / "own.py").write_text("from transformers import PreTrainedTokenizerFast as Fast\nclass Own(Fast): ...\n")
    model = SimpleNamespace(
        skip_tokenizer_init=False, tokenizer=str(folder), tokenizer_revision=None, trust_remote_code=False
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(model)
    model.trust_remote_code = True
    assert type(load_tokenizer(model)).__name__ == "Own"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"structured_outputs_config.backend": "guidance"}, '"guidance"'),
        ({"structured_outputs_config.reasoning_parser": "qwen3"}, 'reasoning parser "qwen3"'),
        ({"model_config.skip_tokenizer_init": True}, "no tokenizer"),
    ],
)
def test_grammars_are_withheld_where_no_worker_can_follow_them(changed, reason):
    assert reason in withheld_by(plan(**changed))[Grammars.id][0]


def test_grammars_that_hold_while_it_reasons_too_begin_with_the_text():
    settings = {"structured_outputs_config.reasoning_parser": "qwen3"}
    assert Grammars.id not in withheld_by(plan(**settings, **{"structured_outputs_config.enable_in_reasoning": True}))


def test_draft_kv_is_withheld_beside_a_connector_which_brings_prompts_of_another_engine():
    assert "no KV connector" in withheld_by(plan(kv_transfer_config=object()))[DraftKV.id][1]
