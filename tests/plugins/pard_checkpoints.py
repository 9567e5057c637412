"""PARD and PARD-2 checkpoints made of the packaged draft model, and their drafts computed in plain torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import TINY, TargetStates
from replaying import Forced, InDeviceForm, Recording
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.plugins.draft_model.proposer import DraftModelProposer

V, H, N = 4096, 256, 8  # of the tiny target
WIDTH, HEADS, HEAD_DIM = 128, 2, 64  # of the packaged draft model, which has one key-value head
MASK_ID = 4084
EPS, THETA = 1e-6, 10_000.0


class ForcedPard(Forced, DraftModelProposer):
    pass


class ForcedInDeviceForm(InDeviceForm, ForcedPard):
    pass


class RecordingPard(Recording, DraftModelProposer):
    pass


@dataclass
class Made:
    """A checkpoint on disk, and in plain terms what a reader of the format would take it to be."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    mask_id: int = MASK_ID
    features: tuple[int | str, ...] = ()  # empty: PARD
    projection: dict[str, Tensor] = field(default_factory=dict)  # warp_model.bin
    scale: float = 0.02

    def save(self) -> Made:
        self.path.mkdir(parents=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / "draft" / name, self.path / name)
        (self.path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.path / "model.safetensors")
        if self.projection:
            torch.save(self.projection, self.path / "warp_model.bin")
        return self


def pard(path: Path, **changes: Any) -> Made:
    """The packaged draft model, told of a mask that it has never seen."""
    config = json.loads((TINY / "draft" / "config.json").read_text()) | {"pard_token": MASK_ID, "dtype": "float32"}
    tensors = {name: each.float() for name, each in load_file(TINY / "draft" / "model.safetensors").items()}
    return Made(path, config | changes, tensors)


def padded(path: Path) -> Made:
    """Its mask lies behind the target's vocabulary, in rows that the draft model alone is padded with."""
    made = pard(path, vocab_size=V + 64, pard_token=V + 3)
    rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    made.tensors["model.embed_tokens.weight"] = torch.cat([made.tensors["model.embed_tokens.weight"], rows])
    made.mask_id = V + 3
    return made


def pard2(path: Path) -> Made:
    """PARD-2: layers in an order of their own, the last of them the target's final state, and a bias."""
    made = pard(path, pard2=True, pard2_target_layers=[N, 3], pard2_target_dim=2 * H, pard2_proj_bias=True)
    generator = torch.Generator().manual_seed(1)
    made.features = ("final", 3)
    made.projection = {
        "target_proj.weight": 0.5 * torch.randn(WIDTH, 2 * H, generator=generator),
        "target_proj.bias": 0.5 * torch.randn(WIDTH, generator=generator),
    }
    return made


def older_pard2(path: Path) -> Made:
    """With the older names of its keys, no width, no bias, and a scale of its own."""
    made = pard(path, spd_type="pard2", pard2_target_layers=[5], pard_target_dim=H, feat_scale=0.05)
    made.features, made.scale = (5,), 0.05
    made.projection = {"target_proj.weight": 0.2 * torch.randn(WIDTH, H, generator=torch.Generator().manual_seed(2))}
    return made


class Replay:
    """What a checkpoint drafts, from whole sequences in fp32: no cache, no steps, nothing of the engine."""

    def __init__(self, made: Made, target: TargetStates) -> None:
        self.made, self.target, self.t = made, target, made.tensors

    def draft(self, committed: Sequence[int], k: int) -> list[int]:
        """K tokens, each the likeliest after its row."""
        return self.logits(committed, k).argmax(-1).tolist()

    @torch.no_grad()
    def logits(self, committed: Sequence[int], k: int, *, shifted: bool = False) -> Tensor:
        """[K, V]: of the newest token's row and of K - 1 rows of the mask. `shifted`: without the row of token 0."""
        rows = [*committed, *[self.made.mask_id] * (k - 1)]
        embedded = self.t["model.embed_tokens.weight"][rows] + self.term(committed, k)
        positions = torch.arange(len(rows))
        x = self.decoder(*(each[1:] if shifted else each for each in (embedded, positions)))
        return rms(x[-k:], self.t["model.norm.weight"]) @ self.t["model.embed_tokens.weight"][:V].T

    def term(self, committed: Sequence[int], k: int) -> Tensor | float:
        """Row t reads the target's states at t - 1; row 0 zeros; rows of the mask the last that there are."""
        if not self.made.features:
            return 0.0
        states = self.target.of(committed[:-1])
        real = torch.cat([states[each] for each in self.made.features], dim=-1)
        phi = torch.cat([torch.zeros(1, real.shape[1]), real, real[-1:].expand(k - 1, -1)])
        weight, bias = self.made.projection["target_proj.weight"], self.made.projection.get("target_proj.bias", 0)
        return self.made.scale * (phi @ weight.T + bias)

    def decoder(self, x: Tensor, positions: Tensor) -> Tensor:
        for index in range(3):
            t = {name: self.t[f"model.layers.{index}.{name}.weight"] for name in LAYER}
            x = x + attention(t, rms(x, t["input_layernorm"]), positions)
            y = rms(x, t["post_attention_layernorm"])
            gate = y @ t["mlp.gate_proj"].T
            x = x + (gate * gate.sigmoid() * (y @ t["mlp.up_proj"].T)) @ t["mlp.down_proj"].T
        return x


LAYER = (
    "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
)  # fmt: skip


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def attention(t: dict[str, Tensor], x: Tensor, positions: Tensor) -> Tensor:
    q = rotated(rms((x @ t["self_attn.q_proj"].T).unflatten(-1, (HEADS, HEAD_DIM)), t["self_attn.q_norm"]), positions)
    k = rotated(rms((x @ t["self_attn.k_proj"].T)[:, None], t["self_attn.k_norm"]), positions)[:, 0]
    v = x @ t["self_attn.v_proj"].T
    later = torch.ones(len(x), len(x)).triu(1).bool()
    scores = (q.transpose(0, 1) @ k.T / HEAD_DIM**0.5).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ t["self_attn.o_proj"].T


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """[T, heads, D]; the two halves of each head are the pairs."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * THETA ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
