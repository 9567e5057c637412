"""Root mean square norms on a CPU by a kernel in C."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..layers.norm import Spelled
from .native.kernels import NativeKernels


class NativeRMSNorm(nn.Module):
    """By our kernel in C.

    A compiler gets the form that is spelled out, which it fuses with what is around it; so does input of another dtype
    than the weight's, which promotes as PyTorch says.
    """

    def __init__(self, spelled: Spelled, kernels: NativeKernels) -> None:
        super().__init__()
        self.weight = spelled.weight
        self.spelled = spelled
        self.register_buffer("wide_gain", spelled.gain.float().contiguous(), persistent=False)
        self._rounds_first = int(spelled.gain.dtype == torch.bfloat16)
        self._eps = spelled.eps.item()
        self._normalize = kernels.rms_norm

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        output: Tensor
        if type(input) is not Tensor or input.dtype != self.weight.dtype:  # no plain tensor: it is being traced
            output = self.spelled(input)
        else:
            rows = input if input.stride(-1) == 1 else input.contiguous()
            output = self._normalize(rows, self.wide_gain, self._eps, self._rounds_first)
        return output
