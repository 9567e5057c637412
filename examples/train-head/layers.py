"""What both heads are made of: plain torch, with the names that tensors have in published checkpoints."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class MLP(nn.Module):
    def __init__(self, sizes: dict) -> None:
        super().__init__()
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """The projections of grouped-query attention with rotary positions. What sees what is the caller's."""

    def __init__(self, sizes: dict, width: int) -> None:
        super().__init__()
        self.head_dim, self.theta = sizes["head_dim"], sizes["rope_parameters"]["rope_theta"]
        self.num_heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, sizes["hidden_size"], bias=False)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, heads, T, D] for x [B, T, H] at positions [T]."""
        return self._rotated(self.q_norm(self._split(self.q_proj(x))), positions)

    def keys_and_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, heads, T, D] each, repeated for all query heads."""
        keys = self._rotated(self.k_norm(self._split(self.k_proj(x))), positions)
        pair = keys, self._split(self.v_proj(x))
        return tuple(each.repeat_interleave(self.num_heads // each.shape[1], dim=1) for each in pair)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        angles = positions[:, None] * self.theta ** -(torch.arange(half) / half)
        left, right = x.chunk(2, dim=-1)
        return torch.cat(
            [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1
        )


def frozen(weight: Tensor) -> nn.Parameter:
    """A copy of a weight of the target that is not trained."""
    return nn.Parameter(weight.detach().clone(), requires_grad=False)
