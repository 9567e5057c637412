"""Sampling parameters that a checkpoint states: used where a request states none, and what is not used is said."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress

import pytest
from hostile import NOT_JSON, changed, tree
from hypothesis import example, given, settings
from transformers import GenerationConfig

from specdec import LLM, SamplingParams
from specdec.core.model.tokenizer import default_params
from specdec.plugins.ngram.proposer import NgramProposer
from specdec.sdk import ConfigError
from specdec.sdk.packaged import packaged

STATED = {"do_sample": True, "temperature": 0.25, "top_k": 7, "repetition_penalty": 1.5, "max_new_tokens": 3}
OTHERS = {"suppress_tokens": [5], "no_repeat_ngram_size": 2}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(packaged("tiny"), tmp_path / "model")


def state(folder, **values):
    file = folder / "generation_config.json"
    old = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(old | values))


def test_a_checkpoints_parameters_are_those_of_requests_without_any(folder, caplog):
    state(folder, **STATED)
    expected = SamplingParams(temperature=0.25, top_k=7, repetition_penalty=1.5, max_tokens=3, seed=1)
    with LLM(folder, max_model_len=64) as llm:
        defaults = llm.get_default_sampling_params()
        assert defaults.replace(seed=1) == expected
        assert len(llm.generate("def main(")[0].outputs[0].token_ids) == 3
        assert len(llm.generate("def main(", SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16
    assert "SD-W310" not in caplog.text


def test_what_is_not_applied_is_named_once(folder, caplog):
    state(folder, **STATED, **OTHERS)
    with LLM(folder, max_model_len=64) as llm:
        llm.generate(["a", "b"])
    assert caplog.text.count("SD-W310") == 1
    assert "not applied  no_repeat_ngram_size, suppress_tokens" in caplog.text


def test_vllm_asks_for_its_defaults_and_a_folder_for_those_of_another_file(folder, tmp_path, caplog):
    state(folder, **STATED, **OTHERS)
    with LLM(folder, max_model_len=64, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    assert "SD-W310" not in caplog.text
    (tmp_path / "other").mkdir()
    state(tmp_path / "other", top_p=0.5)
    with LLM(folder, max_model_len=64, generation_config=tmp_path / "other") as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_p=0.5)


def test_a_file_that_is_missing_or_out_of_range_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="SD-E143"):
        LLM(folder, max_model_len=64, generation_config=tmp_path / "nowhere")
    state(folder, repetition_penalty=-3.0)
    with pytest.raises(ConfigError, match="SD-E1"):
        LLM(folder, max_model_len=64)


def test_a_refused_file_leaves_no_proposer_behind(folder, monkeypatch):
    closed = []
    monkeypatch.setattr(NgramProposer, "close", lambda self: closed.append(self), raising=False)
    state(folder, repetition_penalty=-3.0)
    with pytest.raises(ConfigError, match="SD-E1"):
        LLM(folder, max_model_len=64, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert len(closed) == 1


@settings(max_examples=60, deadline=None)
@example(b'{"": null}')
@given(NOT_JSON | changed({**STATED, **OTHERS, "eos_token_id": 1}).map(json.dumps).map(str.encode))
def test_whatever_the_file_says_it_is_read_or_refused_by_name(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("model")
    (folder / "generation_config.json").write_bytes(text)
    before = tree(folder)
    with suppress(ConfigError):
        assert isinstance(default_params(folder, GenerationConfig()), SamplingParams)
    assert tree(folder) == before


@pytest.mark.parametrize("ends", [[1, 4096], -1])
def test_an_end_token_outside_the_vocabulary_ends_nothing_and_is_not_barred(ends, folder):
    state(folder, eos_token_id=ends)
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=2, logit_bias={4095: 100.0})
    with LLM(folder, max_model_len=64) as llm:
        assert llm.generate("def main(", params)[0].outputs[0].token_ids == (4095,) * 4


def test_the_packaged_model_states_none():
    with LLM("tiny", max_model_len=64) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
