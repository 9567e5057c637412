"""DFlash2's convolutions: short, causal over the slots of a block, around attention and MLP of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk.checkpoint import Checkpoint, unusable

from .fields import anywhere, required

_INTO, _OUT_OF = 0, 1  # the two sides of a sublayer
_SUBLAYERS = {"attention_conv": "self_attn", "mlp_conv": "mlp"}  # of each convolution, by its name


@dataclass(frozen=True)
class ConvolutionShape:
    """How far the taps reach, and how many channels share what a slot adds to them."""

    kernel_size: int
    group_size: int
    width: int

    @classmethod
    def read(cls, checkpoint: Checkpoint, width: int) -> ConvolutionShape | None:
        """Read the convolutions' shape. None if the checkpoint has none. Raises CheckpointError SD-E170, SD-E171."""
        names = ("conv_kernel_size", "conv_group_size")
        if not any(anywhere(checkpoint, name, int) for name in names):
            return None
        kernel_size, group_size = (required(checkpoint, name, int) for name in names)
        if kernel_size < 1 or group_size < 1 or width % group_size:
            expected = f"at least 1, and a group size that divides {width}"
            raise unusable(checkpoint, ", ".join(names), expected, (kernel_size, group_size))
        return cls(kernel_size, group_size, width)

    def add_to(self, layer: nn.Module, num_slots: int) -> None:
        """Give a layer its convolutions, to be filled; `convolve` puts them to work."""
        for name in _SUBLAYERS:
            layer.add_module(name, BlockConvolution(self, num_slots))


class BlockConvolution(nn.Module):
    """Taps [t, h] for each slot and side: learned ones, and what the slot itself adds to them by groups of channels.

    Letters: b requests, W slots of a block, t taps, h channels.
    """

    def __init__(self, shape: ConvolutionShape, num_slots: int) -> None:
        super().__init__()
        self._taps, self._group_size, self._num_slots = shape.kernel_size, shape.group_size, num_slots
        self.base_kernel = nn.Parameter(torch.empty(2, shape.kernel_size, shape.width))
        num_added = 2 * shape.kernel_size * (shape.width // shape.group_size)
        self.kernel_projection = nn.Linear(shape.width, num_added, bias=False)

    def kernels(self, inputs: Tensor) -> Tensor:
        """Taps [b, W, 2, t, h] from the sublayer's normed input [1, b*W, h]."""
        added = self.kernel_projection(inputs).view(
            -1, self._num_slots, 2, self._taps, self._channels // self._group_size
        )
        kernels: Tensor = self.base_kernel + added.repeat_interleave(self._group_size, dim=-1)
        return kernels

    def forward(self, kernels: Tensor, side: int, states: Tensor) -> Tensor:
        """States [1, b*W, h], each slot mixed with those before it in its block."""
        slots = states.view(-1, self._num_slots, self._channels)
        taps = kernels[:, :, side]
        mixed = taps[:, :, 0] * slots
        for tap in range(1, min(self._taps, self._num_slots)):
            mixed[:, tap:] += taps[:, tap:, tap] * slots[:, :-tap]
        return mixed.view_as(states)

    @property
    def _channels(self) -> int:
        return self.base_kernel.shape[-1]


class Convolved(nn.Module):
    """A sublayer, attention or MLP, between the two sides of a convolution."""

    def __init__(self, inner: nn.Module, convolution: BlockConvolution) -> None:
        super().__init__()
        self.inner, self.convolution = inner, convolution

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Any:
        kernels = self.convolution.kernels(hidden_states)
        result = self.inner(self.convolution(kernels, _INTO, hidden_states), **keywords)
        if isinstance(result, tuple):
            return self.convolution(kernels, _OUT_OF, result[0]), *result[1:]
        return self.convolution(kernels, _OUT_OF, result)


def convolve(layer: nn.Module) -> None:
    """Put the convolutions that a layer has around its sublayers."""
    for name, sublayer in _SUBLAYERS.items():
        convolution = layer._modules.pop(name, None)
        if isinstance(convolution, BlockConvolution):
            layer.add_module(sublayer, Convolved(layer.get_submodule(sublayer), convolution))
