"""Linear layers laid out for few rows compute what plain ones do, and take the place of those that gain by it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from inside import target_of
from torch import nn

from specdec import LLM
from specdec.core.kernels.cpu import backend
from specdec.core.kernels.cpu.backend import CpuBackend, NativeBackend
from specdec.core.kernels.cpu.layers import NativeLinear, PackedLinear, packable_bytes

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (1, 3), (2, 2), (1, 6), (1, 7), (1, 33), (7,), (0,), (), (1, 2, 1, 2)]
SIZES = [(6, 3), (64, 130), (256, 640), (40, 64), (2, 1)]
tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # the result is rounded once


def layer_of(size, dtype, bias=True):
    torch.manual_seed(0)
    return nn.Linear(*size, bias=bias).to(dtype).eval().requires_grad_(False)


def exact(plain, rows):
    bias = None if plain.bias is None else plain.bias.double()
    return nn.functional.linear(rows.double(), plain.weight.double(), bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_product_in_double_precision(kernels, shape, bias, size, dtype):
    plain = layer_of(size, dtype, bias)
    rows = torch.randn(*shape, size[0]).to(dtype)
    found = NativeLinear(plain, kernels)(rows)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact(plain, rows), atol=tolerance[dtype], rtol=tolerance[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_gives_the_same_bits_in_every_batch(kernels, dtype, num_threads):
    layer = NativeLinear(layer_of((256, 1100), dtype), kernels)
    rows = torch.randn(50, 256).to(dtype)
    together = layer(rows)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        for size in range(1, 15):
            assert torch.equal(torch.cat([layer(each) for each in rows.split(size)]), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_in_its_row(kernels, dtype):
    layer = NativeLinear(layer_of((64, 70), dtype), kernels)
    rows = torch.randn(5, 64).to(dtype)
    expected = layer(rows)
    rows[2, 3], rows[4, 0] = torch.nan, torch.inf
    found = layer(rows)
    assert found[2].isnan().all()
    assert not found[4].isfinite().any()
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(kernels, dtype):
    layer = NativeLinear(layer_of((64, 70), dtype), kernels)
    rows = torch.randn(5, 128).to(dtype)
    for apart in (rows[:, 64:], rows[::2, :64], rows[:, :64].t().contiguous().t()):
        assert torch.equal(layer(apart), layer(apart.contiguous()))


@pytest.mark.parametrize("rows", [torch.ones(3, 63), torch.ones(3, 64).double(), torch.ones(3, 64).bfloat16()], ids=str)
def test_what_does_not_fit_is_refused(kernels, rows):
    held = rows._use_count()
    with pytest.raises(RuntimeError, match="linear: "):
        NativeLinear(layer_of((64, 70), torch.float32), kernels)(rows)
    assert rows._use_count() == held, "nothing is kept"


@pytest.mark.slow
def test_processors_with_less(lesser_kernels):
    for dtype in DTYPES:
        plain, rows = layer_of((256, 130), dtype), torch.randn(9, 256).to(dtype)
        layer = NativeLinear(plain, lesser_kernels)
        found, allowed = layer(rows), tolerance[dtype]
        torch.testing.assert_close(found.double(), exact(plain, rows), atol=allowed, rtol=allowed)
        assert torch.equal(layer.weight, plain.weight)
        assert torch.equal(layer(rows[:1]), found[:1])


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 33), (7,)], ids=str)
@pytest.mark.parametrize("size", [(5, 3), (64, 130)], ids=str)
def test_onednns_form_equals_the_plain_one(shape, size):
    plain = layer_of(size, torch.bfloat16)
    rows = torch.randn(*shape, size[0]).bfloat16()
    packed = PackedLinear(plain)
    torch.testing.assert_close(packed(rows), plain(rows))
    assert torch.equal(packed.weight, plain.weight)


class Special(nn.Linear):
    pass


def model():
    odd = nn.Linear(7, 8).bfloat16()
    return nn.Sequential(nn.Linear(8, 6), Special(8, 6), nn.Linear(8, 6).bfloat16(), odd, nn.Linear(8, 6).half())


@pytest.mark.parametrize(
    ("processor", "has_kernels", "expected"),
    [
        ({}, True, [NativeLinear, Special, NativeLinear, nn.Linear, nn.Linear]),
        ({"avx512_bf16": True}, True, [NativeLinear, Special, NativeLinear, PackedLinear, nn.Linear]),
        ({"amx_bf16": True}, True, [NativeLinear, Special, PackedLinear, PackedLinear, nn.Linear]),
        ({"avx512_bf16": True}, False, [nn.Linear, Special, PackedLinear, PackedLinear, nn.Linear]),
        ({"avx2": True}, False, [nn.Linear, Special, nn.Linear, nn.Linear, nn.Linear]),
    ],
    ids=str,
)
def test_plain_layers_take_the_fastest_form(kernels, processor, has_kernels, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    served = NativeBackend(kernels) if has_kernels else CpuBackend()
    assert [form_of(served, layer) for layer in model()] == expected
    if PackedLinear not in expected:  # this machine may be unable to make one
        laid_out = nn.Sequential(model())
        served.lay_out(laid_out, room=None, drop=False)
        assert [type(layer) for layer in laid_out[0]] == expected


def form_of(served, layer):
    form = served.linear_form(layer) if type(layer) is nn.Linear else None
    return type(layer) if form is None else getattr(form, "func", form)


def test_without_onednn_nothing_is_its(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    laid_out = model()
    CpuBackend().lay_out(laid_out, room=None, drop=False)
    assert {type(layer) for layer in laid_out} == {nn.Linear, Special}


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_plain_weights_that_are_needed_stay(kernels, dtype):
    tied = nn.ModuleList([nn.Embedding(30, 8), nn.Linear(8, 30, bias=False), nn.Linear(8, 6)]).to(dtype)
    tied[1].weight = tied[0].weight
    expected = tied[2].weight.detach().clone()
    served = NativeBackend(kernels)
    assert packable_bytes(tied, served.linear_form) == tied[0].weight.nbytes
    served.lay_out(tied, room=None, drop=True)
    assert tied[1].weight is tied[0].weight
    assert dict(tied[2].named_parameters()).keys() == {"bias"}
    assert torch.equal(tied[2].weight, expected)
    assert packable_bytes(tied, served.linear_form) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_keeps_its_tied_weights(dtype, monkeypatch):
    monkeypatch.setattr(backend, "PackedLinear", partial(pytest.fail, "AMX is not looked at here"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    target = target_of(LLM("tiny", max_model_len=64, dtype=dtype)).model
    assert type(target.get_output_embeddings()) is NativeLinear
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
