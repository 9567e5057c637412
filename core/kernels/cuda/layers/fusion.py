"""Layers of a network that hand on what is not computed yet, and norms and gates that compute it with their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ...layers.norm import Spelled, fuse_rms_norms
from .deferred import Activated, Addend, Sum, plain
from .operations import LayerKernels
from .rotary import defer_rotations

OUTPUTS = ("o_proj", "down_proj")
"""Layers whose outputs are added to the residual stream, by the names that transformers gives them."""
GATE, ACTIVATION = "gate_proj", "act_fn"
"""Where a gated network has its gate and the function that is applied to it."""


class KernelRMSNorm(nn.Module):
    """By a kernel, with the sum that it is the norm of. A compiler gets the form that is spelled out."""

    def __init__(self, spelled: Spelled, kernels: LayerKernels) -> None:
        super().__init__()
        self.weight = spelled.weight
        self.spelled = spelled
        self._eps = spelled.eps.item()
        self._kernels = kernels

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        if torch.compiler.is_compiling() or input.dtype != self.weight.dtype:
            output: Tensor = self.spelled(plain(input))
        elif isinstance(input, Sum) and input.is_waiting:
            total, output = self._kernels.add_rms_norm(*input.parts, self.spelled.gain, self._eps)
            input.settle(total)
        else:
            output = self._kernels.rms_norm(plain(input), self.spelled.gain, self._eps)
        return output


class WaitingSiLU(nn.Module):
    """SiLU of a gate, which waits for what it gates."""

    def __init__(self, activate: nn.Module, kernels: LayerKernels) -> None:
        super().__init__()
        self.activate = activate
        self._multiply: Callable[..., Tensor] = kernels.silu_mul

    def forward(self, input: Tensor) -> Tensor:
        """[..., F] -> [..., F]."""
        if torch.compiler.is_compiling():
            output: Tensor = self.activate(input)
            return output
        return Activated(plain(input), self.activate, self._multiply)


def fuse_layers(network: nn.Module, kernels: LayerKernels) -> None:
    """Join norms with sums, activations with products and rotations with the cache, in place."""
    fuse_rms_norms(network, partial(KernelRMSNorm, kernels=kernels))
    defer_rotations(network, kernels)
    for module in list(network.modules()):
        children = dict(module.named_children())
        if GATE in children and _is_silu(children.get(ACTIVATION)):
            setattr(module, ACTIVATION, WaitingSiLU(children[ACTIVATION], kernels))
        for name in OUTPUTS:
            if name in children:
                children[name].register_forward_hook(_to_be_added)


def _to_be_added(module: nn.Module, args: Any, output: Any) -> Any:
    plain_output = isinstance(output, Tensor) and not torch.compiler.is_compiling()
    return Addend(plain(output)) if plain_output else output


def _is_silu(module: nn.Module | None) -> bool:
    """As its outputs show."""
    if module is None or next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return False
    values = torch.linspace(-9, 9, 64)
    try:
        return torch.equal(module(values), silu(values))
    except Exception:  # whatever it computes, it is not a function of a number
        return False
