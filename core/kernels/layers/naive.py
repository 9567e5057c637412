"""Operations of layers in plain torch, rounded where modelling code rounds; the kernels beside it must agree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(rows: Tensor, gain: Tensor, eps: float) -> Tensor:
    """[..., H] / rms(row) * gain [H], in fp32: rounded to the gain's dtype, multiplied, and then to the rows' dtype."""
    wide = rows.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal.to(gain.dtype) * gain).to(rows.dtype)


def add_rms_norm(first: Tensor, second: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum [..., H] of two, and its norm."""
    total = first + second
    return total, rms_norm(total, gain, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """[..., F] silu(gate) * up."""
    return silu(gate) * up


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[N, Hq, D] and [N, Hkv, D] turned by cos, sin [N, D]: each first half with its second half."""
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + _turned(query) * sin, keys * cos + _turned(keys) * sin


def rotate_and_store(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [N, Hkv, D]
    values: Tensor,  # [N, Hkv, Dv]
    cos: Tensor,  # [N, D]
    sin: Tensor,  # [N, D]
    slots: Tensor,  # [N] int64
    stored_keys: Tensor,  # [slots, Hkv, D]
    stored_values: Tensor,  # [slots, Hkv, Dv]
) -> Tensor:  # [N, Hq, D]
    """Turn as `rotate` does; keys and values go to their slots."""
    query, keys = rotate(query, keys, cos, sin)
    stored_keys.index_copy_(0, slots, keys)
    stored_values.index_copy_(0, slots, values)
    return query


def _turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
