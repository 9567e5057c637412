"""The uniforms of a step's drafts as a Triton kernel: one launch instead of some eighty for each token."""

# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-decorators, disable-error-code="misc, no-untyped-def, no-untyped-call, no-any-return"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..philox import Stream
from .launch import STREAMING
from .row_tiles import uniform

DRAFT = tl.constexpr(int(Stream.DRAFT))
PER_PROGRAM = 128  # requests


@triton.jit(do_not_specialize=["keys_ptr", "positions_ptr", "num_requests"])
def draft_uniforms_kernel(keys_ptr, positions_ptr, uniforms_ptr, num_requests, WIDTH: tl.constexpr):
    """Grid [requests / WIDTH, count]."""
    index, requests = tl.program_id(1), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = requests < num_requests
    keys = tl.load(keys_ptr + requests, mask=there, other=0)
    positions = tl.load(positions_ptr + requests, mask=there, other=0)
    tl.store(uniforms_ptr + index * num_requests + requests, uniform(keys, positions, DRAFT, index), mask=there)


def draft_uniforms(keys: Tensor, positions: Tensor, count: int) -> Tensor:
    """Compute `kernels.philox.draft_uniforms` in one launch."""
    uniforms = torch.empty(count, len(keys), dtype=torch.float64, device=keys.device)
    grid = (triton.cdiv(len(keys), PER_PROGRAM), count)
    draft_uniforms_kernel[grid](
        keys.contiguous(), positions.contiguous(), uniforms, len(keys), PER_PROGRAM, **STREAMING
    )
    return uniforms
