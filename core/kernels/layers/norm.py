"""Root mean square norms, recognised by what they compute, in forms that cost less than modelling code's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor, nn
from torch.func import functional_call

_SCALES = torch.tensor([1e-4, 1e-2, 1.0, 100.0], dtype=torch.float32)  # the small ones tell epsilons apart


class Spelled(nn.Module):
    """A norm in PyTorch's operations. Its epsilon is a tensor: a compiler would make one of a number in every call."""

    gain: Tensor
    eps: Tensor

    def __init__(self, weight: nn.Parameter, gain: Tensor, eps: float) -> None:
        """`gain`: in fp32 it is applied before the result is rounded, in 16 bits after that."""
        super().__init__()
        self.weight = weight  # where other code may look for it
        self.register_buffer("gain", gain.detach(), persistent=False)
        self.register_buffer("eps", torch.tensor(eps, dtype=torch.float32), persistent=False)


class FusedRMSNorm(Spelled):
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, of fp32: four operations instead of seven."""

    def __init__(self, weight: nn.Parameter, gain: Tensor, eps: float) -> None:
        super().__init__(weight, gain, eps)
        size = gain.numel()
        self.register_buffer("scaled_gain", gain.detach() * size**0.5, persistent=False)
        self.register_buffer("scaled_eps", torch.tensor(eps * size, dtype=torch.float32), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        inverse = torch.linalg.vecdot(input, input).add_(self.scaled_eps).rsqrt_()
        output: Tensor = input * inverse.unsqueeze(-1) * self.scaled_gain
        return output


class WideRMSNorm(Spelled):
    """A norm of 16 bits that is computed in fp32, to the last bit what modelling code gives."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        wide = input.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        output: Tensor = (normal.to(self.gain.dtype) * self.gain).to(input.dtype)
        return output


def fuse_rms_norms(model: nn.Module, form_of: Callable[[Spelled], nn.Module]) -> None:
    """Replace every module of a model that computes an RMS norm, as its outputs show, by its form.

    A norm whose weight is kept in another dtype than the model's stays: what it returns is modelling code's choice.
    """
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            spelled = _other_form(module, dtype)
            if spelled is not None:
                setattr(parent, name, form_of(spelled))


def _other_form(module: nn.Module, dtype: torch.dtype | None) -> Spelled | None:
    """The form with the same outputs on inputs of several sizes; None if it has none."""
    weights = list(module.parameters())
    epsilons = {value for value in vars(module).values() if isinstance(value, float)}
    if len(weights) != 1 or not epsilons or next(module.children(), None) or next(module.buffers(), None) is not None:
        return None
    (weight,) = weights
    if weight.dim() != 1 or weight.dtype != dtype or weight.dtype not in _TOLERANCES:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    inputs = torch.randn(8, weight.numel(), generator=torch.Generator().manual_seed(0)) + 0.3
    inputs = (inputs * _SCALES[:, None, None]).to(weight.dtype)
    here = nn.Parameter(weight.detach().cpu(), requires_grad=False)  # a device may round otherwise, and is not asked
    forms = zip(_forms(here, epsilons), _forms(weight, epsilons), strict=True)
    return next((form for shown, form in forms if _agree(module, shown, inputs)), None)


def _forms(weight: nn.Parameter, epsilons: set[float]) -> Iterator[Spelled]:
    """What a norm with this weight may be."""
    fused = weight.dtype == torch.float32
    gains = (weight, 1 + weight) if fused else (weight, weight.float(), 1 + weight.float())
    for gain, eps in product(gains, epsilons):
        yield (FusedRMSNorm if fused else WideRMSNorm)(weight, gain, eps)


_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.0, torch.float16: 0.0}
"""Of the dtypes that norms have forms for."""


def _agree(module: nn.Module, form: Spelled, inputs: Tensor) -> bool:
    (name,) = (name for name, _ in module.named_parameters())
    try:
        with torch.inference_mode():
            expected = functional_call(module, {name: form.weight}, inputs.clone())
    except Exception:  # whatever it computes, it is not a norm of vectors
        return False
    found, tolerance = form(inputs), _TOLERANCES[inputs.dtype]
    same_kind = isinstance(expected, Tensor) and (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return same_kind and torch.allclose(found, expected, tolerance, 0)
