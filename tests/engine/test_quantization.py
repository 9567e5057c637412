"""Targets and drafters whose linear layers are stored in int8, each on its own."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, counter
from inside import proposer_of, target_of
from sweeps import covering
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from specdec import LLM
from specdec.core.kernels.cpu.layers import Int8Linear
from specdec.core.model.inference_form import QUANTIZATIONS
from specdec.sdk import ConfigError

torchao = pytest.importorskip("torchao.quantization")

K = 3
DRAFTER = {"method": "draft_model", "num_speculative_tokens": K}


def is_int8(layer: nn.Module) -> bool:
    return type(layer) is Int8Linear or is_torchao_int8(layer)


def is_torchao_int8(layer: nn.Module) -> bool:
    return type(layer.weight.data) is not torch.Tensor and type(layer.weight.data).__name__.startswith("Int8")


def projection(model):
    return model.model.layers[0].mlp.down_proj


def token_ids(llm, prompts):
    outputs = llm.generate([{"prompt_token_ids": prompt[:40]} for prompt in prompts[:3]], GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft"), covering([None, *QUANTIZATIONS], [None, *reversed(QUANTIZATIONS)]))
def test_target_and_drafter_are_quantised_each_on_its_own(target, draft, target_path, prompts):
    config = DRAFTER | {"model": str(target_path), "quantization": draft}
    llm = LLM("tiny", quantization=target, speculative_config=config, max_model_len=256)
    network = proposer_of(llm)._model
    assert is_int8(projection(target_of(llm).model)) == (target is not None)
    assert is_int8(projection(network)) == (draft is not None)
    assert not is_int8(network.get_output_embeddings())
    outputs = token_ids(llm, prompts)
    if target is None:  # rounded activations turn float noise between batch shapes into steps
        assert outputs == token_ids(LLM("tiny", max_model_len=256), prompts)
    if target == draft:
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0.8 * counter(llm, "spec_decode_num_draft_tokens")


@pytest.mark.slow
def test_checkpoint_that_is_stored_quantised_is_served_as_it_is(target_path, tmp_path, prompts):
    int8 = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32, quantization_config=int8)
    model.save_pretrained(tmp_path)
    stored = LLM(tmp_path, max_model_len=256)
    assert is_torchao_int8(projection(target_of(stored).model))
    plain = model.generate(torch.tensor([prompts[0][:40]]), do_sample=False, max_new_tokens=GREEDY.max_tokens)
    assert list(token_ids(stored, prompts)[0][:8]) == plain[0, 40:48].tolist()


@pytest.mark.parametrize("shape", [(64, 48), (96, 33), (7, 5)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_layers_are_within_half_a_step_of_the_plain_ones(shape, num_rows, dtype, bias):
    torch.manual_seed(0)
    plain = nn.Linear(*shape, bias=bias, dtype=dtype)
    inputs = torch.randn(2, num_rows, shape[0], dtype=dtype)
    with torch.inference_mode():
        expected, found = plain(inputs).double(), Int8Linear(plain)(inputs)
    step = plain.weight.detach().double().abs().amax(1) / 127
    rounding = inputs.double().abs().sum(-1, keepdim=True) * step / 2
    assert found.dtype == dtype
    assert torch.equal(Int8Linear(plain)(inputs[:, :1]), found[:, :1])
    assert bool(((found.double() - expected).abs() <= rounding + 2**-7 * expected.abs() + 2**-6).all())


def test_an_int8_layer_of_zeros_gives_zeros():
    plain = nn.Linear(32, 16, bias=False)
    nn.init.zeros_(plain.weight)
    with torch.inference_mode():
        assert not Int8Linear(plain)(torch.randn(2, 32)).any()
        assert Int8Linear(plain)(torch.randn(2, 0, 32)).shape == (2, 0, 16)


@pytest.mark.parametrize("where", ["target", "draft"])
def test_unknown_quantization_is_refused_with_what_is_offered(where, target_path):
    draft = DRAFTER | {"model": str(target_path), "quantization": "int8_weight" if where == "draft" else None}
    with pytest.raises(ConfigError, match=r"SD-E132(.|\n)*int8_weight_only, int8_dynamic"):
        LLM("tiny", quantization="int8_weight" if where == "target" else None, speculative_config=draft)
