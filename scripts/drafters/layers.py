"""The layers all drafter families are built of; parameter names are those of the published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


@dataclass(frozen=True)
class Dims:
    """The sizes of one decoder layer."""

    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 640
    eps: float = 1e-6
    rope_theta: float = 10_000.0


class Memory(Protocol):
    """Where an attention layer finds the keys and values of other rows."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Remember `k`, `v` [B, KV, R, D] and return what `q` [B, Q, R, D] attends to, [B, Q, R, D]."""
        ...


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class GatedMLP(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.ffn, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.ffn, bias=False)
        self.down_proj = nn.Linear(dims.ffn, dims.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `qk_norm` normalises each head first, as Qwen3 does."""

    def __init__(self, dims: Dims, in_features: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.dims = dims
        self.q_proj = nn.Linear(in_features, dims.heads * dims.head_dim, bias=False)
        self.k_proj = nn.Linear(in_features, dims.kv_heads * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(in_features, dims.kv_heads * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(dims.heads * dims.head_dim, dims.hidden, bias=False)
        self.q_norm = RMSNorm(dims.head_dim, dims.eps) if qk_norm else None
        self.k_norm = RMSNorm(dims.head_dim, dims.eps) if qk_norm else None

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        k, v = self.keys_and_values(x, positions)
        return self.output(memory.attend(self.queries(x, positions), k, v))

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self._split(self.q_proj(x))
        return rotate(q if self.q_norm is None else self.q_norm(q), positions, self.dims.rope_theta)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        k = self._split(self.k_proj(x))
        k = k if self.k_norm is None else self.k_norm(k)
        return rotate(k, positions, self.dims.rope_theta), self._split(self.v_proj(x))

    def output(self, heads: Tensor) -> Tensor:
        """[B, Q, R, D] -> [B, R, hidden]"""
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """[B, R, heads * D] -> [B, heads, R, D]"""
        return x.unflatten(-1, (-1, self.dims.head_dim)).transpose(1, 2)


class Qwen3Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.self_attn = Attention(dims, dims.hidden, qk_norm=True)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = GatedMLP(dims)

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding in halves of `x` [B, heads, R, D] at `positions` [R] or [B, 1, R]."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.float()[..., None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """[B, KV, R, D] -> [B, heads, R, D]: every key-value head once per query head of its group."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention of `q` [B, Q, R, D] over `k`, `v` [B, KV, S, D] where `visible` [..., R, S]."""
    k, v = per_query_head(k, q.shape[1]), per_query_head(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v.to(q.dtype)


class CausalMemory:
    """The cache of a drafter at work: rows in order, each sees itself and all before it."""

    def __init__(self) -> None:
        self._rows: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._rows is not None:
            k, v = torch.cat([self._rows[0], k], dim=2), torch.cat([self._rows[1], v], dim=2)
        self._rows = k, v
        old = k.shape[2] - q.shape[2]
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(old)
        return attend(q, k, v, visible)
