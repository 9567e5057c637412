"""Hydra heads for the tiny target, written as published, and their drafts computed in plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import TargetStates
from replaying import Forced, InDeviceForm, Recording
from torch import Tensor

from specdec.plugins.hydra.proposer import HydraProposer

H, V, NUM_HEADS = 256, 4096, 3
HEADS, KV_HEADS, HEAD_DIM, FFN = 4, 2, 64, 640  # of the tiny target
CONFIG = {"hydra_num_heads": NUM_HEADS, "hydra_num_layers": 2, "grounded_heads": True, "hydra_head_arch": "prefix-mlp"}
PREFIX = "prefix_embeding_layer."


class ForcedHydra(Forced, HydraProposer):
    pass


class ForcedInDeviceForm(InDeviceForm, ForcedHydra):
    pass


class RecordingHydra(Recording, HydraProposer):
    pass


@dataclass
class Hydra:
    """A checkpoint: its configuration and its tensors, by published names."""

    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(self.config))
        torch.save(self.tensors, path / "hydra_lm_head.pt")
        return path

    @torch.no_grad()
    def rollout(
        self, committed: list[int], k: int, target: TargetStates, drafted: list[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """K draft tokens (those given, else the likeliest) and the logits [K, V] of each. Nothing is cached."""
        t = self.tensors
        rows = self.prefix(target.of(committed[:-1])["final"])
        tokens, logits = [committed[-1]], []
        for head in range(k):
            state = torch.cat([rows[-1], *target.embedding[tokens]])
            for place in (1, 3):
                stem = f"hydra_mlp.{head}.{place}."
                z = t[stem + "linear.weight"] @ state + t[stem + "linear.bias"]
                if place == 1:
                    state = t[stem + "res_connection.weight"] @ state + t[stem + "res_connection.bias"]
                state = state + z * z.sigmoid()
            logits.append(t[f"hydra_lm_head.{head}.1.weight"] @ state + t[f"hydra_lm_head.{head}.1.bias"])
            tokens.append(int(logits[-1].argmax()) if drafted is None else drafted[head])
        return tokens[1:], torch.stack(logits)

    def draft(self, target: TargetStates) -> Any:
        """What is drafted greedily after committed tokens."""
        return lambda committed, k: self.rollout(committed, k, target)[0]

    def prefix(self, x: Tensor) -> Tensor:
        """One Llama layer and its norm over whole sequences."""
        t = {name.removeprefix(f"{PREFIX}layers.0."): each for name, each in self.tensors.items()}
        y = rms(x, t["input_layernorm.weight"])
        q, k, v = ((y @ t[f"self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM)) for p in "qkv")
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ t["self_attn.o_proj.weight"].T
        y = rms(x, t["post_attention_layernorm.weight"])
        gate = y @ t["mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (y @ t["mlp.up_proj.weight"].T)) @ t["mlp.down_proj.weight"].T
        return rms(x, self.tensors[f"{PREFIX}norm.weight"])


def hydra(target: TargetStates, texts: Sequence[list[int]]) -> Hydra:
    """Heads whose residual layers are fitted to texts that they are tried on, so that some drafts are accepted."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 0.05) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    layer = {
        "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, H),
        "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, H),
        "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, H),
        "self_attn.o_proj.weight": random(H, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": random(FFN, H),
        "mlp.up_proj.weight": random(FFN, H),
        "mlp.down_proj.weight": random(H, FFN),
        "input_layernorm.weight": 1 + random(H),
        "post_attention_layernorm.weight": 1 + random(H),
    }
    tensors = {f"{PREFIX}layers.0.{name}": each for name, each in layer.items()}
    tensors |= {f"{PREFIX}norm.weight": 1 + random(H), f"{PREFIX}embed_tokens.weight": random(V, H)}
    for head in range(NUM_HEADS):
        width = (head + 2) * H
        tensors |= {
            f"hydra_mlp.{head}.1.linear.weight": random(H, width, scale=0.01),
            f"hydra_mlp.{head}.1.linear.bias": random(H),
            f"hydra_mlp.{head}.1.res_connection.weight": torch.zeros(H, width),
            f"hydra_mlp.{head}.1.res_connection.bias": random(H),
            f"hydra_mlp.{head}.3.linear.weight": random(H, H, scale=0.01),
            f"hydra_mlp.{head}.3.linear.bias": random(H),
            f"hydra_lm_head.{head}.1.weight": target.head.detach() + random(V, H, scale=0.01),
            f"hydra_lm_head.{head}.1.bias": random(V),
        }
    made = Hydra(tensors=tensors)
    for head in range(NUM_HEADS):
        made.tensors[f"hydra_mlp.{head}.1.res_connection.weight"] = fitted(made, head, target, texts)
    return made


@torch.no_grad()
def fitted(made: Hydra, head: int, target: TargetStates, texts: Sequence[list[int]]) -> Tensor:
    """What a head's inputs are multiplied by to be near the target's final state of the last token among them."""
    inputs, outputs = [], []
    for text in texts:
        final, ahead = target.of(text)["final"], head + 1
        tokens = [target.embedding[text[1 + place : len(text) - head + place]] for place in range(ahead)]
        inputs.append(torch.cat([made.prefix(final)[:-ahead], *tokens], dim=-1))
        outputs.append(final[ahead:])
    x, y = torch.cat(inputs), torch.cat(outputs)
    return torch.linalg.solve(x.T @ x + torch.eye(x.shape[1]), x.T @ y).T.contiguous()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
