"""Whatever is wrong with a target's files, loading it raises an error of ours that says what."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress

import pytest
import torch
from engine_helpers import GREEDY, make_llm, run
from hostile import changed, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scripts.small_models import small_config, small_model

from specdec.core.model.model_support import locate_model
from specdec.sdk import ConfigError, SpecdecError
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import UnsupportedModelError

pytestmark = pytest.mark.usefixtures("proven_targets")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    small_model(small_config("llama")).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def load(folder):
    return make_llm(model=folder, max_model_len=64)


def configured(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


WEIGHTS = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: b"\xff" * 4000,
    "a pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("damage", WEIGHTS)
def test_damaged_weights(damage, folder):
    file = folder / "model.safetensors"
    file.write_bytes(WEIGHTS[damage](file.read_bytes()))
    with pytest.raises(ConfigError, match=r"SD-E143 (.|\n)*because .*SafetensorError"):
        load(folder)


CONFIGURATIONS = {"broken": "{", "a list": "[]", "null": "null", "empty": "", "deep": "[" * 100_000}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_that_is_no_json_object(name, folder):
    (folder / "config.json").write_text(CONFIGURATIONS[name])
    with pytest.raises(ConfigError, match="SD-E143"):
        load(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "x"},
        {"num_attention_heads": 0},
        {"vocab_size": -3},
        {"hidden_act": "zz"},
        {"layer_types": ["x"]},
    ],
    ids=str,
)
def test_values_that_no_model_has(values, folder):
    configured(folder, **values)
    with pytest.raises(ConfigError, match="SD-E143"):
        load(folder)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_no_configuration_makes_loading_raise_what_is_not_ours(sound, tmp_path_factory, data):
    home = tmp_path_factory.mktemp("home")
    folder = shutil.copytree(sound, home / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(data.draw(changed(json.loads(file.read_text())))))
    before = tree(home)
    with suppress(SpecdecError):
        load(folder)
    assert tree(home) == before
    shutil.rmtree(home)


def test_a_negative_number_of_layers(folder):
    configured(folder, num_hidden_layers=-1)
    with pytest.raises(UnsupportedModelError, match="SD-E144"):
        load(folder)


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"model_type": "frobnicate"}, "newer transformers"),
        ({"model_type": "frobnicate", "auto_map": {"AutoConfig": "configuration_x.X"}}, "its code"),
    ],
    ids=["unknown type", "remote code"],
)
def test_models_that_need_code_say_trust_remote_code(values, advice, folder):
    configured(folder, **values)
    with pytest.raises(ConfigError, match="SD-E143") as error:
        load(folder)
    assert "trust_remote_code=True" in error.value.facts["fix"]


LIBRARIES = {
    "compressed-tensors": "compressed-tensors",
    "gptq": "optimum",
    "awq": "gptqmodel",
    "hqq": "HQQ",
    "quark": "Quark",
    "mxfp4": "ccelerate",
    "fp8": "ccelerate",
}


@pytest.mark.parametrize("method", LIBRARIES)
def test_quantised_weights_without_their_library(method, folder, monkeypatch):
    for name in ("mxfp4", "finegrained_fp8"):  # accelerate alone is installed for other tests
        monkeypatch.setattr(f"transformers.quantizers.quantizer_{name}.is_accelerate_available", lambda: False)
    configured(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 32})
    with pytest.raises(ConfigError, match="SD-E143") as error:
        load(folder)
    assert LIBRARIES[method] in error.value.facts["because"]
    assert "install the library" in error.value.facts["fix"]


def test_missing_tensors_are_refused_by_name(folder):
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match="SD-E188") as error:
        load(folder)
    assert error.value.facts["missing"] == "lm_head.weight"


def test_tied_tensors_are_not_missing(tmp_path):
    small_model(small_config("gpt2")).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load(tmp_path)


def test_tensors_of_another_size_are_refused_with_both(folder):
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(7, 32)}))
    with pytest.raises(ConfigError, match="SD-E188") as error:
        load(folder)
    assert error.value.facts["of another size"] == "lm_head.weight [7, 32], expected [128, 32]"


def test_unused_tensors_are_said_once(folder, caplog):
    change_tensors(folder, lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(2)}))
    with caplog.at_level("WARNING", logger="transformers"):  # which says so; commands silence it
        load(folder)
    said = [record.getMessage() for record in caplog.records if "mtp.fc.weight" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("model_type", ["ctrl", "biogpt"])
def test_no_tokenizer_is_no_error(model_type, tmp_path):
    small_model(small_config(model_type)).save_pretrained(tmp_path)
    assert load(tmp_path).get_tokenizer() is None


@pytest.mark.parametrize("model_type", ["blenderbot-small", "gpt_neox_japanese"])
def test_no_tokenizer_hides_no_other_reason(model_type, tmp_path):
    small_model(small_config(model_type)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="SD-E144"):
        load(tmp_path)


def test_a_broken_tokenizer_is_an_error(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="SD-E149"):
        load(folder)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "xlstm"])
def test_other_layers_are_refused_before_weights_are_loaded(model_type, tmp_path):
    small_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="SD-E142"):
        load(tmp_path)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_outputs_of_attention_can_be_viewed(kernels, tmp_path):
    small_model(small_config("afmoe")).save_pretrained(tmp_path)
    llm = make_llm(model=tmp_path, max_model_len=64, cpu_kernels=kernels)
    llm.engine.add_request([3, 4, 5], GREEDY.replace(max_tokens=4))
    assert len(run(llm.engine)) == 1


def test_states_of_another_form_are_refused_before_a_step(tmp_path):
    small_model(small_config("gemma3n_text")).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"SD-E145 (.|\n)*several states"):
        make_llm("Recorder", options={"hidden_states": (0, 1, "final")}, model=tmp_path, max_model_len=64)


def test_a_name_that_is_too_long_for_a_file():
    with pytest.raises(ConfigError, match="SD-E140"):
        make_llm(model="x" * 300)


@pytest.mark.parametrize(
    ("name", "fact", "said"),
    [
        ("tinny", "did you mean", "tiny"),
        ("Tiny", "did you mean", "tiny"),
        ("tiny/eagel3", "did you mean", "tiny/eagle3"),
        ("tiny/llama", "packaged", "tiny/medusa"),
        ("no hub id", "hub", "HFValidationError"),
    ],
)
def test_a_name_that_nobody_can_have_is_refused_without_a_download(name, fact, said):
    with pytest.raises(ConfigError, match="SD-E140") as target:
        locate_model(name)
    with pytest.raises(ConfigError, match="SD-E105") as checkpoint:
        Checkpoint.open(name)
    for refused in target, checkpoint:
        assert said in refused.value.facts[fact]
        assert refused.value.facts["fix"]


def test_hub_ids_are_left_to_the_hub():
    for name in ("somebody/tiny", "somebody/eagle3-tiny", "tiny-labs/target"):
        assert locate_model(name) == name
