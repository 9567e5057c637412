"""The network of an EAGLE-3 head (https://arxiv.org/abs/2503.01840), with the names that its checkpoints have."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention, silu

DEPTHS = 4  # draft steps that are trained at once


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Layer(nn.Module):
    """One decoder layer on [embedding; state]. Names are those of the checkpoint."""

    def __init__(self, sizes: dict) -> None:
        super().__init__()
        hidden, eps, self.head_dim = sizes["hidden_size"], sizes["rms_norm_eps"], sizes["head_dim"]
        self.theta = sizes["rope_parameters"]["rope_theta"]
        width, kv_width = (sizes[n] * self.head_dim for n in ("num_attention_heads", "num_key_value_heads"))
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        linear = {"q_proj": (2 * hidden, width), "k_proj": (2 * hidden, kv_width), "v_proj": (2 * hidden, kv_width)}
        self.self_attn = nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in linear.items()})
        self.self_attn["o_proj"] = nn.Linear(width, hidden, bias=False)
        ffn = sizes["intermediate_size"]
        linear = {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
        self.mlp = nn.ModuleDict({n: nn.Linear(*s, bias=False) for n, s in linear.items()})

    def forward(self, embedded: Tensor, states: Tensor, depth: int, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        residual = self.hidden_norm(states)
        pair = torch.cat([self.input_layernorm(embedded), residual], dim=-1)
        q, k, v = (self._heads(self.self_attn[n](pair)) for n in ("q_proj", "k_proj", "v_proj"))
        positions = depth + torch.arange(q.shape[2])
        x = residual + self.self_attn["o_proj"](
            attend(self._rotate(q, positions), self._rotate(k, positions), v, memory)
        )
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, T, D]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        angles = positions[:, None] * self.theta ** -(torch.arange(half) / half)
        left, right = x.chunk(2, dim=-1)
        return torch.cat(
            [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1
        )


def attend(q: Tensor, k: Tensor, v: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Row t of depth d sees rows 0..t of depth 0, which have the target's states, and row t of depths 1..d."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    memory.append((k, v))
    if len(memory) == 1:
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        of_text = (q @ memory[0][0].transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        own = torch.stack([(q * keys).sum(-1) for keys, _ in memory[1:]], dim=-1)
        weights = (torch.cat([of_text, own], dim=-1) * q.shape[-1] ** -0.5).softmax(-1)
        heads = weights[..., : q.shape[2]] @ memory[0][1]
        for depth, (_, values) in enumerate(memory[1:]):
            heads = heads + weights[..., q.shape[2] + depth, None] * values
    return heads.transpose(1, 2).flatten(2)


class Head(nn.Module):
    def __init__(self, target: nn.Module, num_layers_read: int, sizes: dict) -> None:
        super().__init__()
        hidden = sizes["hidden_size"]
        self.embed_tokens = nn.Embedding.from_pretrained(target.get_input_embeddings().weight.detach().clone())
        self.fc = nn.Linear(num_layers_read * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(sizes)])
        self.norm = RMSNorm(hidden, sizes["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, sizes["vocab_size"], bias=False)
        self.lm_head.weight = nn.Parameter(target.get_output_embeddings().weight.detach().clone(), requires_grad=False)

    def forward(self, ids: Tensor, read: Tensor) -> list[Tensor]:
        """Logits [B, T, V] of each depth. Row t drafts from the target's states up to t and the token after it."""
        states, memory, logits = self.fc(read), [], []
        for depth in range(DEPTHS):
            tokens = pad(ids[:, 1 + depth :], (0, 1 + depth))
            states = self.layers[0](self.embed_tokens(tokens), states, depth, memory)
            logits.append(self.lm_head(self.norm(states)))
        return logits
