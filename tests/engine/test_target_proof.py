"""A target is compared with transformers' eager attention when it is loaded, and what differs is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from engine_helpers import make_llm
from inside import target_of
from scripts.small_models import WINDOW, small_config, small_model
from scripts.target_sweep import RECORD
from transformers import LlamaForCausalLM

from specdec.core.cache.addressing import Addressing, CacheView
from specdec.core.model import target as target_module
from specdec.sdk import ConfigError
from specdec.sdk.errors import UnsupportedModelError

pytestmark = pytest.mark.usefixtures("proven_targets")
EQUAL = [name for name, shown in json.loads(RECORD.read_text())["types"].items() if shown["outcome"] == "equal"]
QUICK = {"llama", "qwen3_moe", "gemma2"}


@pytest.fixture
def save(tmp_path):
    def save(model_type, **changes):
        config = small_config(model_type)
        for name, value in changes.items():
            setattr(config, name, value)
        small_model(config).save_pretrained(tmp_path)
        return tmp_path

    return save


def load(folder, **settings):
    return make_llm(model=folder, max_model_len=128, block_size=4, **settings)


def wider_window(spec, layer):
    return replace(spec, window=spec.window and spec.window + 1)


def no_window(spec, layer):
    return replace(spec, window=None)


def another_scale(spec, layer):
    return replace(spec, scale=spec.scale * 1.3)


def no_cap(spec, layer):
    return replace(spec, softcap=None)


def only_in_layer_1(spec, layer):
    return replace(spec, window=None) if layer == 1 else spec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("model_type", "fault", "layer"),
    [
        ("mistral", wider_window, 0),
        ("mistral", no_window, 0),
        ("llama", another_scale, 0),
        ("gemma2", no_cap, 0),
        ("mistral", only_in_layer_1, 1),
    ],
)
def test_attention_that_differs_is_refused_with_the_first_layer_that_does(
    model_type, fault, layer, dtype, save, monkeypatch
):
    capped = {"attn_logit_softcapping": 2.0} if model_type == "gemma2" else {}
    folder = save(model_type, **capped)
    attend = CacheView.attend
    monkeypatch.setattr(CacheView, "attend", lambda self, at, q, k, v, spec: attend(self, at, q, k, v, fault(spec, at)))
    with pytest.raises(UnsupportedModelError) as refused:
        load(folder, dtype=dtype)
    assert refused.value.code == "SD-E189"
    assert refused.value.facts["first difference"] == f"the attention of layer {layer}"
    assert load(folder, dtype=dtype, prove_target=False)


def test_keys_of_another_request_are_refused(save, monkeypatch):
    span = Addressing._span

    def of_the_first_block(self, blocks, *others):
        return span(self, [0] * len(blocks), *others)

    folder = save("llama")
    monkeypatch.setattr(Addressing, "_span", of_the_first_block)
    with pytest.raises(UnsupportedModelError, match="SD-E189"):
        load(folder)


def test_a_window_that_is_only_in_the_mask_is_said_for_its_layer(save, monkeypatch):
    folder = save("qwen2_moe")
    assert target_of(load(folder)).windows == [WINDOW, None]
    monkeypatch.setattr(target_module, "hand_on", lambda limits, module: None)
    with pytest.raises(UnsupportedModelError, match=r"SD-E189 (.|\n)*attention of layer 0"):
        load(folder)


def test_a_window_that_neither_call_nor_mask_names_is_refused(save):
    with pytest.raises(UnsupportedModelError, match=r"SD-E141 (.|\n)*without a window"):
        load(save("moshi"))


def test_attention_in_another_dtype_than_the_model_is_refused(save, monkeypatch):
    """Its class keeps all but the embedding in float32, as some do."""
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"layers", "norm", "lm_head"})
    with pytest.raises(UnsupportedModelError, match=r"SD-E141 (.|\n)*computes in torch.float32 where .*bfloat16"):
        load(save("llama"), dtype="bfloat16")


def test_windows_are_exceeded_by_the_text(save):
    folder = save("mistral")
    assert target_of(load(folder)).windows == [WINDOW, WINDOW]


def test_a_large_model_is_proved_where_that_is_asked_for(save, monkeypatch):
    monkeypatch.setattr("specdec.core.model.target_proof.MOST_PARAMETERS", 100)
    attend = CacheView.attend
    folder = save("llama")
    monkeypatch.setattr(
        CacheView, "attend", lambda self, at, q, k, v, spec: attend(self, at, q, k, v, another_scale(spec, at))
    )
    assert load(folder)
    with pytest.raises(UnsupportedModelError, match="SD-E189"):
        load(folder, prove_target=True)


def test_a_model_that_eager_attention_cannot_run_is_refused_cleanly(save):
    folder = save("deepseek_v3")
    config = json.loads((folder / "config.json").read_text()) | {"num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="SD-E192"):
        load(folder)


@pytest.mark.parametrize("settings", [{"cpu_kernels": "torch"}, {"quantization": "int8_weight_only"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("deviation", [0.3, 0.02])
def test_rounding_is_no_difference(deviation, dtype, settings, tmp_path):
    config = small_config("mistral")
    config.initializer_range = deviation
    small_model(config).save_pretrained(tmp_path)
    assert load(tmp_path, dtype=dtype, **settings)


@pytest.mark.parametrize(
    "model_type", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in EQUAL]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_type_that_is_served_is_refused_in_half_precision(model_type, dtype, save):
    folder = save(model_type)
    assert target_of(load(folder, dtype=dtype)).dtype == getattr(torch, dtype)
