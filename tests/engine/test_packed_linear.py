"""Packed and turned linear layers compute what plain ones do, and are used where they pay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec import LLM
from specdec.core.kernels.linear import (
    FEWEST_PACKED_BYTES,
    FEWEST_PACKED_ROWS,
    PackedLinear,
    Packing,
    pack_linears,
    packable_bytes,
    turn_linears,
)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 4), (2, 2), (1, 33), (7,), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", [(5, 3), (64, 130), (256, 640)], ids=str)
def test_packed_equals_plain(shape, bias, size):
    torch.manual_seed(0)
    plain = nn.Linear(*size, bias=bias).eval()
    values = torch.randn(*shape, size[0])
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(values), plain(values), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2), (1, 33), (7,)], ids=str)
@pytest.mark.parametrize("size", [(5, 3), (64, 130)], ids=str)
def test_packed_bfloat16_equals_plain(shape, size):
    torch.manual_seed(0)
    plain = nn.Linear(*size).bfloat16().eval()
    values = torch.randn(*shape, size[0]).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(values), plain(values))


class Special(nn.Linear):
    pass


NOTHING, NARROW, ALL = Packing(False, False), Packing(True, False), Packing(True, True)


@pytest.mark.parametrize("packing", [NOTHING, NARROW, ALL], ids=["large", "and bfloat16", "all"])
def test_plain_layers_are_packed_where_it_pays(packing):
    large, small = (1024, FEWEST_PACKED_BYTES // 4096), (1024, FEWEST_PACKED_BYTES // 4096 - 1)
    model = nn.Sequential(
        nn.Linear(*large),
        Special(*large),
        nn.Linear(*small).bfloat16(),
        nn.Sequential(nn.Linear(*large)),
        nn.Linear(*small),
    )
    assert packable_bytes(model, packing) == (0 if packing is ALL else 2 * FEWEST_PACKED_BYTES)
    pack_linears(model, packing)
    narrow = PackedLinear if packing.bfloat16 else nn.Linear
    few = PackedLinear if packing.float32 else nn.Linear
    assert [type(layer) for layer in model] == [PackedLinear, Special, narrow, nn.Sequential, few]
    assert type(model[3][0]) is PackedLinear
    assert packable_bytes(model, packing) == 0


def test_only_plain_weights_that_are_needed_stay():
    model = nn.ModuleList([nn.Embedding(30, 8), nn.Linear(8, 30, bias=False), nn.Linear(8, 6)])
    model[1].weight = model[0].weight
    expected = model[2].weight.detach().clone()
    assert packable_bytes(model, ALL) == model[0].weight.nbytes
    pack_linears(model, ALL, drop=True)
    assert model[1].weight is model[0].weight
    assert dict(model[2].named_parameters()).keys() == {"bias"}
    assert torch.equal(model[2].weight, expected)


def test_processors_are_told_apart(monkeypatch):
    def packing(**found):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
        return Packing.of_this_processor()

    assert packing(cpu_name="Intel Xeon", avx2=True, amx_bf16=True) == NARROW
    assert packing(cpu_name="Intel Core", avx2=True) == NOTHING
    assert packing(cpu_name="AMD EPYC", avx2=True, avx512_bf16=True) == ALL
    assert packing(architecture="aarch64", bf16=True) == NOTHING


def test_without_onednn_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(1024, FEWEST_PACKED_BYTES // 4096))
    assert packable_bytes(model, ALL) == 0
    pack_linears(model, ALL)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("num_rows", [1, 3, 8, 50])
def test_a_turned_layer_computes_the_same_and_takes_no_more_memory(num_rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 130), Special(130, 8), nn.Linear(8, 4))
    values = torch.randn(2, num_rows, 64)
    with torch.inference_mode():
        expected = model(values)
        turn_linears(model)
        torch.testing.assert_close(model(values), expected, atol=1e-5, rtol=1e-5)
    assert [layer.weight.stride() for layer in model] == [(1, 130), (130, 1), (1, 4)]
    assert model[0].weight.untyped_storage().nbytes() == 4 * 64 * 130


def test_turning_a_tied_head_leaves_the_embedding_as_it_is():
    model = nn.ModuleList([nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)])
    model[1].weight = model[0].weight
    turn_linears(model)
    assert model[0].weight.is_contiguous()
    assert torch.equal(model[0].weight, model[1].weight)


def test_target_is_packed_and_keeps_its_tied_weights():
    target = LLM("tiny", max_model_len=64).engine.parts.target.model
    assert type(target.get_output_embeddings()) is PackedLinear
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
    half = LLM("tiny", max_model_len=64, dtype="bfloat16").engine.parts.target.model
    assert type(half.get_output_embeddings()) is (PackedLinear if Packing.of_this_processor().bfloat16 else nn.Linear)


def test_few_rows_stay_matrix_vector_products():
    plain = nn.Linear(64, 32).eval()
    packed = PackedLinear(plain, FEWEST_PACKED_ROWS, keep=True)
    values = torch.randn(FEWEST_PACKED_ROWS - 1, 64)
    with torch.inference_mode():
        assert torch.equal(packed(values), plain(values))
