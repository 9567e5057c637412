"""Layers that read the same input give what they gave, by one product."""

from __future__ import annotations

import pytest
import torch
from inside import proposer_of, target_of
from torch import nn

from specdec import LLM
from specdec.core.kernels.cpu.backend import NativeBackend
from specdec.core.kernels.layers.fused_linear import FusedLinear, fuse_linears
from specdec.core.model.inference_form import prepare


class Attention(nn.Module):
    def __init__(self, bias=False, value_width=8):
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = nn.Linear(8, 6, bias=bias)
        self.v_proj = nn.Linear(value_width, 6, bias=bias)

    def layers(self):
        return self.q_proj, self.k_proj, self.v_proj


def products_of(attention, monkeypatch):
    """Counts the calls of the group's product from here on."""
    product = attention.q_proj.group.product
    calls, forward = [], product.forward
    monkeypatch.setattr(product, "forward", lambda input: calls.append(1) or forward(input))
    return calls


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_product_computes_the_group(bias, dtype, monkeypatch):
    attention = Attention(bias).to(dtype)
    values = torch.randn(1, 5, 8, dtype=dtype)
    with torch.inference_mode():
        expected = [layer(values) for layer in attention.layers()]
        weights = [(layer.weight.clone(), layer.bias) for layer in attention.layers()]
        fuse_linears(attention)
        calls = products_of(attention, monkeypatch)
        for layer, output, (weight, plain_bias) in zip(attention.layers(), expected, weights, strict=True):
            torch.testing.assert_close(layer(values), output)
            assert torch.equal(layer.weight, weight)
            assert (layer.bias is None) == (plain_bias is None)
    assert len(calls) == 1
    held = attention.q_proj.group.computed
    assert held.input is None
    assert not held.outputs


def test_layers_called_with_inputs_of_their_own_compute_for_themselves(monkeypatch):
    attention = Attention()
    rows, others = torch.randn(3, 8), torch.randn(4, 8)
    with torch.inference_mode():
        q, k, v = attention.layers()
        expected = [k(rows), v(rows), q(others), k(others), v(rows)]
        fuse_linears(attention)
        calls = products_of(attention, monkeypatch)
        q, k, v = attention.layers()
        for found, output in zip([k(rows), v(rows), q(others), k(others), v(rows)], expected, strict=True):
            torch.testing.assert_close(found, output)
    assert len(calls) == 3


def test_a_second_call_computes_anew():
    """A buffer that is written to and passed again is another input."""
    attention = Attention()
    fuse_linears(attention)
    rows = torch.randn(3, 8)
    with torch.inference_mode():
        first = attention.q_proj(rows)
        rows.mul_(2)
        torch.testing.assert_close(attention.q_proj(rows), 2 * first)


def test_layers_that_differ_stay_as_they_are():
    wide, mixed, special = Attention(value_width=10), Attention(), Attention()
    mixed.v_proj = nn.Linear(8, 6, bias=True)
    special.k_proj = SimpleLinear(8, 6)
    model = nn.ModuleList([wide, mixed, special])
    fuse_linears(model)
    assert not any(isinstance(module, FusedLinear) for module in model.modules())


class SimpleLinear(nn.Linear):
    pass


@pytest.mark.parametrize("quantization", [None, "int8_weight_only", "int8_dynamic"])
def test_fused_layers_are_prepared_like_any_others(quantization):
    if quantization == "int8_dynamic":
        pytest.importorskip("torchao")
    torch.manual_seed(0)
    attention = nn.Module()
    for name, width in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
        setattr(attention, name, nn.Linear(64, width, bias=False))
    values = torch.randn(1, 4, 64)
    with torch.inference_mode():
        expected = attention.k_proj(values)
        prepare(attention, quantization, NativeBackend.load("native"))
        torch.testing.assert_close(attention.k_proj(values), expected, atol=0.02 if quantization else 1e-5, rtol=0.02)


def test_the_target_and_its_drafter_are_fused():
    with LLM("tiny", speculative_config={"model": "tiny/eagle3"}, max_model_len=64) as llm:
        layer = target_of(llm).model.model.layers[0]
        network = proposer_of(llm).network
        assert {type(each) for each in (layer.self_attn.v_proj, layer.mlp.up_proj)} == {FusedLinear}
        assert any(isinstance(module, FusedLinear) for module in network.modules())
