"""Root mean square norms in fp32 on a CPU in four operations instead of the seven that modelling code spells out."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

_SCALES = (1e-4, 1e-2, 1.0, 100.0)  # the small ones tell epsilons apart


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, for inference."""

    def __init__(self, weight: nn.Parameter, gain: Tensor, eps: float) -> None:
        super().__init__()
        size = gain.numel()
        self.weight = weight  # where other code may look for it
        self.register_buffer("scaled_gain", gain.detach() * size**0.5, persistent=False)
        self.register_buffer("scaled_eps", torch.tensor(eps * size), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        inverse = torch.linalg.vecdot(input, input).add_(self.scaled_eps).rsqrt_()
        output: Tensor = input * inverse.unsqueeze(-1) * self.scaled_gain
        return output


def fuse_rms_norms(model: nn.Module) -> None:
    """Replace every module of a model on the CPU that computes an fp32 RMS norm, as its outputs show."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            fused = _fused_form(module)
            if fused is not None:
                setattr(parent, name, fused)


def _fused_form(module: nn.Module) -> FusedRMSNorm | None:
    """The fused form with the same outputs on inputs of several sizes; None if it has none."""
    weights = list(module.parameters())
    epsilons = {value for value in vars(module).values() if isinstance(value, float)}
    if len(weights) != 1 or not epsilons or next(module.children(), None) or next(module.buffers(), None) is not None:
        return None
    (weight,) = weights
    if weight.dim() != 1 or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    inputs = torch.randn(2, weight.numel(), generator=torch.Generator().manual_seed(0)) + 0.3
    for gain in (weight, 1 + weight):
        for eps in epsilons:
            fused = FusedRMSNorm(weight, gain, eps)
            if all(_agree(module, fused, inputs * scale) for scale in _SCALES):
                return fused
    return None


def _agree(module: nn.Module, fused: FusedRMSNorm, inputs: Tensor) -> bool:
    try:
        with torch.inference_mode():
            expected = module(inputs.clone())
    except Exception:  # whatever it computes, it is not a norm of vectors
        return False
    found = fused(inputs)
    return isinstance(expected, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, 1e-5, 0)
