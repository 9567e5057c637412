"""Checkpoints that are stored quantised are served as transformers loads them, or refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from engine_helpers import GREEDY, make_llm, tokens
from inside import target_of
from safetensors.torch import save_file
from scripts.small_models import small_config, small_model
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3Config, LlamaConfig

from specdec.core.kernels.cpu.backend import NativeBackend
from specdec.core.model.inference_form import check_stored_quantization, stored_quantization
from specdec.sdk import ConfigError
from specdec.sdk.errors import UnsupportedModelError

PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 40))]


@pytest.fixture
def folder(tmp_path):
    small_model(small_config("llama")).save_pretrained(tmp_path)
    return tmp_path


def say(folder, **quantization):
    """Write it into config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def in_8_bits(model):
    """The tensors of a checkpoint with fp8 weights and one scale for each."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor
        if "proj" in name:
            scale = tensor.abs().amax() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.view(1, 1)
    return tensors


def test_fp8_weights_give_the_text_of_transformers(folder):
    pytest.importorskip("accelerate")
    model = small_model(small_config("llama"))
    save_file(in_8_bits(model), folder / "model.safetensors", metadata={"format": "pt"})
    say(folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128], fmt="e4m3")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert not torch.equal(theirs.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    llm = make_llm("ngram", model=folder, max_model_len=128, dtype="float32")
    ours = tokens(llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY.replace(max_tokens=16)))
    for prompt, found in zip(PROMPTS, ours, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert found == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("method", "library"), [("gptq", "optimum"), ("awq", "gptqmodel"), ("hqq", "HQQ")])
def test_a_missing_library_is_named(method, library, folder):
    say(folder, quant_method=method, bits=4, group_size=32)
    with pytest.raises(ConfigError, match=rf"SD-E143 (.|\n)*{library}"):
        make_llm(model=folder, max_model_len=64)


def test_nothing_is_quantised_twice(folder):
    say(folder, quant_method="fp8")
    with pytest.raises(ConfigError, match="SD-E266"):
        make_llm(model=folder, max_model_len=64, quantization="int8_weight_only")


def by_torchao(granularity):
    """What it writes of layers whose weights and activations are int8."""
    data = {"granularity": granularity, "act_mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}}
    return {"_type": "Int8DynamicActivationInt8WeightConfig", "_version": 2, "_data": data}


PER_TENSOR, PER_ROW = ({"_type": name, "_version": 1, "_data": {}} for name in ("PerTensor", "PerRow"))
BY_NAME = {"_type": "ModuleFqnToConfig", "_data": {"module_fqn_to_config": {"_default": by_torchao(PER_TENSOR)}}}
NVFP4 = {
    "_type": "NVFP4DynamicActivationNVFP4WeightConfig",
    "_version": 1,
    "_data": {"use_dynamic_per_tensor_scale": True},
}
SHARED_SCALE = {"input_activations": {"dynamic": True, "strategy": "tensor", "num_bits": 8}}


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": SHARED_SCALE}},
        {"quant_method": "torchao", "quant_type": {"default": by_torchao(PER_TENSOR)}},
        {"quant_method": "torchao", "quant_type": {"default": by_torchao([PER_TENSOR, PER_ROW])}},
        {"quant_method": "torchao", "quant_type": {"default": BY_NAME}},
        {"quant_method": "torchao", "quant_type": {"default": NVFP4}},
    ],
    ids=[
        "outliers",
        "outliers by default",
        "scale",
        "torchao",
        "torchao of two",
        "torchao by name",
        "torchao of 4 bits",
    ],
)
def test_layers_in_which_neighbours_change_a_token_are_refused(quantization, folder):
    say(folder, **quantization)
    with pytest.raises(UnsupportedModelError, match="SD-E267"):
        make_llm(model=folder, max_model_len=64)


def test_scales_of_each_token_are_not_refused():
    config = LlamaConfig(quantization_config={"quant_type": {"default": by_torchao([PER_ROW, PER_TENSOR])}})
    assert stored_quantization(config)
    check_stored_quantization(config, None)


def test_what_the_text_part_states_holds_for_the_model():
    for stated in ({"quant_type": by_torchao(PER_TENSOR)}, {"load_in_8bit": True}):
        config = Gemma3Config(text_config={"quantization_config": stated})
        assert stored_quantization(config)
        with pytest.raises(UnsupportedModelError, match="SD-E267"):
            check_stored_quantization(config, None)
        with pytest.raises(ConfigError, match="SD-E266"):
            check_stored_quantization(config, "int8_dynamic")


DAMAGED = [
    {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": None},
    {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": "6"},
    {"quant_method": "compressed-tensors", "config_groups": [1]},
    {"quant_method": "torchao", "quant_type": {"default": by_torchao("PerTensor")}},
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=["null", "text", "groups", "granularity"])
def test_damaged_settings_end_in_an_error_of_ours(damaged, folder):
    say(folder, **damaged)
    with pytest.raises(ConfigError, match="SD-E143"):
        make_llm(model=folder, max_model_len=64)


def test_a_layer_that_quantises_its_input_keeps_its_own_forward():
    """compressed-tensors gives it to plain layers, of which packing, fusing and narrowing know the weights only."""
    network = nn.Module()
    network.q_proj, network.k_proj, network.v_proj = (nn.Linear(32, 32) for _ in range(3))
    plain = nn.Linear(32, 32)
    network.other = plain
    network.q_proj.forward = lambda input: input.round()
    backend = NativeBackend.load("native")
    for change in (
        backend.fuse,
        lambda each: backend.narrow(each, plain),
        lambda each: backend.lay_out(each, room=None, drop=False),
    ):
        change(network)
        assert torch.equal(network.q_proj(torch.full((1, 32), 0.7)), torch.ones(1, 32))
    assert type(network.other) is not nn.Linear


@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_tensors_give_the_text_of_transformers(bits, tmp_path):
    quantizing = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = small_model(small_config("llama"))
    model.generation_config.eos_token_id = None
    name = {8: "W8A8", 4: "W4A16"}[bits]
    scheme = quantizing.preset_name_to_scheme(name, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 32
    config = quantizing.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="frozen"
    )
    quantizing.apply_quantization_config(model, config)
    for module in model.modules():
        scale = dict(module.named_parameters(recurse=False)).get("weight_scale")
        if scale is not None:
            groups = module.weight.abs().view(len(module.weight), scale.shape[1], -1)
            scale.data.copy_(groups.amax(-1) / (2 ** (bits - 1) - 1))
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    llm = make_llm("ngram", model=tmp_path, max_model_len=128, dtype="float32")
    assert "forward" in vars(target_of(llm).model.model.layers[0].mlp.up_proj)
    ours = tokens(llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY.replace(max_tokens=16)))
    for prompt, found in zip(PROMPTS, ours, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert found == expected[0, len(prompt) :].tolist()
