"""Linear layers on a CPU whose weights are int8, one scale for each output.

What a CPU pays for in decoding is reading weights. One row of a 768 x 3072 layer took 590 us in fp32, 160 us in
bfloat16 and 75 us so, on one core; eight rows took 900, 260 and 270 us. With hundreds of rows it is as fast as fp32.
A row's result does not depend on the rows beside it. For one row of such layers torchao's weight-only int8, uncompiled,
takes four times as long in fp32 and seven times in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..backend import is_plain_linear

_MULTIPLES = 32, 16  # of inputs and outputs that torch's int8 product is made for: it reads past the end of others


class Int8Linear(nn.Module):
    """`nn.Linear` for inference: symmetric int8 weights, products of bfloat16 inputs summed in fp32."""

    narrow: Tensor  # [out, in] int8
    scale: Tensor  # [out] bfloat16; the weights are rounded to it, so that it costs no precision

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        weight = plain.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        narrow = (weight / scale[:, None].float()).round_().clamp_(-127, 127).to(torch.int8)
        self.register_buffer("narrow", narrow)
        self.register_buffer("scale", scale)
        self.bias = plain.bias
        self._dtype = plain.weight.dtype
        self._fits = all(size % multiple == 0 for size, multiple in zip(weight.t().shape, _MULTIPLES, strict=True))

    @property
    def weight(self) -> Tensor:
        """[out, in], as they count, in the dtype of the layer that was replaced: for code that looks at it."""
        return (self.narrow.float() * self.scale[:, None].float()).to(self._dtype)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of the input."""
        rows = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
        if self._fits:
            output = torch._weight_int8pack_mm(rows, self.narrow, self.scale)
        else:
            output = linear(rows, self.narrow.to(torch.bfloat16)) * self.scale
        output = output.to(input.dtype).view(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def narrow_linears(network: nn.Module, keep: nn.Module | None) -> None:
    """Replace every linear layer of a network on the CPU, but `keep`, by its int8 form."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if is_plain_linear(layer) and layer is not keep:
                setattr(parent, name, Int8Linear(layer))
