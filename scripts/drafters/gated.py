"""The attention layer of hybrids (Qwen3-Next, Qwen3.5): its output is gated, half of each head is rotated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .layers import Dims, GatedMLP, Memory, rotate

HYBRID = Dims(hidden=192, heads=4, kv_heads=2, head_dim=32, ffn=448)
ROTARY_SHARE = 0.5  # of a head, from its beginning


class ZeroCentredNorm(nn.Module):
    """RMS norm whose weight is an offset from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return (1 + self.weight) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class GatedAttention(nn.Module):
    """`q_proj` makes a query and a gate for each head."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.q_proj = nn.Linear(dims.hidden, 2 * dims.heads * dims.head_dim, bias=False)
        self.k_proj = nn.Linear(dims.hidden, dims.kv_heads * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(dims.hidden, dims.kv_heads * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(dims.heads * dims.head_dim, dims.hidden, bias=False)
        self.q_norm = ZeroCentredNorm(dims.head_dim, dims.eps)
        self.k_norm = ZeroCentredNorm(dims.head_dim, dims.eps)

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        size = self.dims.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
        k, v = (each(x).unflatten(-1, (-1, size)) for each in (self.k_proj, self.v_proj))
        q, k = (self._rotated(each.transpose(1, 2), positions) for each in (self.q_norm(q), self.k_norm(k)))
        heads = memory.attend(q, k, v.transpose(1, 2)).transpose(1, 2).flatten(2)
        return self.o_proj(heads * gate.flatten(2).sigmoid())

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, heads, R, D]"""
        count = int(self.dims.head_dim * ROTARY_SHARE)
        turned = rotate(x[..., :count], positions, self.dims.rope_theta)
        return torch.cat([turned, x[..., count:]], dim=-1)


class GatedLayer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.input_layernorm = ZeroCentredNorm(dims.hidden, dims.eps)
        self.self_attn = GatedAttention(dims)
        self.post_attention_layernorm = ZeroCentredNorm(dims.hidden, dims.eps)
        self.mlp = GatedMLP(dims)

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, memory)
        return x + self.mlp(self.post_attention_layernorm(x))
