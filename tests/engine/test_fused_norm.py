"""RMS norms are recognised by what they compute, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import torch
from inside import target_of
from torch import nn

from specdec import LLM
from specdec.core.kernels.cpu.backend import CpuBackend
from specdec.core.kernels.cpu.layers import NativeRMSNorm
from specdec.core.kernels.layers.norm import FusedRMSNorm, WideRMSNorm


class Norm(nn.Module):
    def __init__(self, size=48, eps=1e-6, offset=0.0):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(size))
        self.variance_epsilon, self.offset = eps, offset

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return (self.gain + self.offset) * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class WithoutSquare(Norm):
    def forward(self, hidden_states):
        return self.gain * hidden_states / (hidden_states.abs().mean(-1, keepdim=True) + self.variance_epsilon)


class Gated(Norm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states if gate is None else hidden_states * gate)


class Stubborn(Norm):
    def forward(self, hidden_states):
        raise KeyError("not these inputs")


class HiddenEpsilon(Norm):
    def __init__(self):
        super().__init__(eps=1e-6)
        self.variance_epsilon = torch.tensor(1e-6)
        self.offset = 0


def fused(module):
    parent = nn.Sequential(module)
    CpuBackend().lay_out(parent, room=None, drop=False)
    return parent[0]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_a_fused_norm_computes_the_same(offset, eps, scale):
    torch.manual_seed(0)
    norm = Norm(eps=eps, offset=offset)
    replaced = fused(norm)
    assert type(replaced) is FusedRMSNorm
    assert replaced.weight is norm.gain
    inputs = scale * torch.randn(2, 5, 3, 48)
    with torch.inference_mode():
        torch.testing.assert_close(replaced(inputs), norm(inputs), atol=0, rtol=1e-5)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(48, bias=False),
        nn.LayerNorm(48),
        nn.PReLU(48),
        nn.Embedding(5, 48),
        WithoutSquare(),
        Gated(),
        Stubborn(),
        HiddenEpsilon(),
        Norm().bfloat16(),
        Norm().half(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_stay_as_they_are(module):
    assert fused(module) is module


class RoundsFirst(Norm):
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.gain * wide.to(hidden_states.dtype)


class RoundsLast(Norm):
    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (self.offset + self.gain.float())).type_as(hidden_states)


@pytest.mark.parametrize("norm", [RoundsFirst, RoundsLast, lambda eps: RoundsLast(eps=eps, offset=1.0)])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_a_norm_of_bfloat16_keeps_every_bit(norm, eps):
    torch.manual_seed(0)
    module = norm(eps=eps).bfloat16()
    replaced = fused(module)
    assert type(replaced) is WideRMSNorm
    with torch.inference_mode():
        for scale in (1e-4, 1.0, 1e3):
            inputs = (scale * torch.randn(2, 50, 48)).bfloat16()
            assert torch.equal(replaced(inputs), module(inputs))


@pytest.mark.parametrize(("dtype", "form"), [("float32", FusedRMSNorm), ("bfloat16", WideRMSNorm)])
def test_every_norm_of_the_target_is_replaced(dtype, form):
    model = target_of(LLM("tiny", max_model_len=64, dtype=dtype)).model
    replaced = [module for module in model.modules() if type(module) is NativeRMSNorm]
    assert [type(module.spelled) for module in replaced] == [form] * (8 * 4 + 1)


@pytest.mark.parametrize("form", [FusedRMSNorm, WideRMSNorm])
def test_an_epsilon_is_not_rounded_to_the_users_default_dtype(form, half_by_default):
    weight = nn.Parameter(torch.ones(8, dtype=torch.float32))
    assert form(weight, weight, 1e-6).eps.item() == pytest.approx(1e-6, rel=1e-7)
