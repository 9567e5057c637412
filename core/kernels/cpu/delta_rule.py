"""The gated delta rule (arXiv 2412.06464) over few tokens on a CPU, as modelling code calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .native.kernels import NativeKernels

_EPS = 1e-6  # of the norms of queries and keys, in all modelling code


class NativeDeltaRule:
    """By our kernel in C, in fp32."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._take_tokens = kernels.delta_rule

    def __call__(
        self,
        query: Tensor,  # [B, N, heads, D], or fewer heads, each for as many adjacent ones of the values
        key: Tensor,  # as query
        value: Tensor,  # [B, N, heads, Dv]
        g: Tensor,  # [B, N, heads], logarithms of decays
        beta: Tensor,  # [B, N, heads]
        initial_state: Tensor | None = None,  # [B, heads, D, Dv]
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Outputs [B, N, heads, Dv], and the state after them: the initial one changed in place where it is fp32."""
        if query.shape[2] != value.shape[2]:
            query, key = (each.repeat_interleave(value.shape[2] // each.shape[2], dim=2) for each in (query, key))
        inputs = [each.float().contiguous() for each in (query, key, value, g, beta)]
        if initial_state is None:
            shape = *query.shape[:1], *query.shape[2:], value.shape[3]
            state = torch.zeros(shape, dtype=torch.float32, device=query.device)
        else:
            state = initial_state.float().contiguous()
        output: Tensor = self._take_tokens(*inputs, state, _EPS, int(use_qk_l2norm_in_kernel))
        return output.to(query.dtype), state
