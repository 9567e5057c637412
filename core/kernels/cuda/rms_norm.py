"""Root mean square norms by a Triton kernel, rounded where modelling code rounds."""

# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ..layers.norm import Spelled
from .launch import next_power_of_two

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}  # an fma would round once where modelling code rounds twice


class KernelRMSNorm(nn.Module):
    """A norm of one launch. A compiler gets the form that is spelled out."""

    def __init__(self, spelled: Spelled) -> None:
        super().__init__()
        self.weight = spelled.weight
        self.spelled = spelled
        self._eps = spelled.eps.item()

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        if torch.compiler.is_compiling() or input.dtype != self.weight.dtype:
            output: Tensor = self.spelled(input)
            return output
        return rms_norm(input, self.spelled.gain, self._eps)


@triton.jit
def rms_norm_kernel(
    rows_ptr, token_stride, head_stride, gain_ptr, output_ptr, eps, HEADS: tl.constexpr, SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """Grid [rows]: HEADS rows a token."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_SIZE)
    there = columns < SIZE
    start = row // HEADS * token_stride + row % HEADS * head_stride
    values = tl.load(rows_ptr + start + columns, mask=there, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    normal = (values * inverse).to(gain_ptr.dtype.element_ty).to(tl.float32)
    gain = tl.load(gain_ptr + columns, mask=there, other=0.0)
    scaled = (normal * gain.to(tl.float32)).to(gain.dtype)
    tl.store(output_ptr + row * SIZE + columns, scaled.to(output_ptr.dtype.element_ty), mask=there)


def rms_norm(rows: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The norm of [..., H], a view of a joined product too; `layers.norm.WideRMSNorm` is the plain form."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    by_head = rows.flatten(0, -3) if rows.dim() > 3 else rows.reshape(-1, 1, rows.shape[-1])
    tokens, heads, size = by_head.shape
    padded_size = next_power_of_two(size)
    output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    rms_norm_kernel[(tokens * heads,)](
        by_head, by_head.stride(0), by_head.stride(1), gain, output, eps, HEADS=heads, SIZE=size,
        PADDED_SIZE=padded_size, num_warps=warps_of(padded_size), **OPTIONS,
    )  # fmt: skip
    return output


def warps_of(padded_size: int) -> int:
    """Warps of a program that holds so many numbers: at most 16 numbers per thread, as long as there are threads."""
    return min(16, max(1, padded_size // 512))
