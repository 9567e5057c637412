"""The EAGLE networks once more in plain torch, and proposers that show what they see and draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from make_eagle import EPS, H, Made
from plugin_helpers import TargetStates
from replaying import Forced, InDeviceForm, Recording, Shown
from torch import Tensor

from specdec.plugins.eagle.proposer import Eagle3Proposer, EagleProposer


class Replay:
    """What a checkpoint drafts, from whole sequences in fp32: no cache, no steps, nothing of the engine."""

    def __init__(self, made: Made, target: TargetStates) -> None:
        self.made, self.target, self.t = made, target, made.tensors
        self.table = self.t.get("embed_tokens.weight", target.embedding).float()
        self.head = self.t.get("lm_head.weight", target.head).float()
        self._of: dict[tuple[int, ...], dict[int | str, Tensor]] = {}

    def states(self, tokens: Sequence[int]) -> Tensor:
        """What the target's hidden states become for the first layer: [T, h], of every position of a sequence."""
        key = tuple(tokens)
        if key not in self._of:
            self._of[key] = self.target.of(tokens)
        z = torch.cat([self._of[key][k] for k in self.made.features], dim=-1)
        return z if self.made.method == "eagle" else self.fuse(z)

    def fuse(self, z: Tensor) -> Tensor:
        if "input_norm.weight" in self.t:
            z = self.rms(z, self.t["input_norm.weight"])
        if "fc_norm.0.weight" in self.t:
            chunks = z.split(H, dim=-1)
            z = torch.cat([self.rms(chunk, self.t[f"fc_norm.{j}.weight"]) for j, chunk in enumerate(chunks)], dim=-1)
        return z @ self.t["fc.weight"].T + self.t.get("fc.bias", 0) if "fc.weight" in self.t else z

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], length: int, k: int) -> list[int]:
        """The K tokens after the first `length` of a sequence."""
        return self.run(tokens, length, k)[0]

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], length: int, k: int, drawn: Sequence[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """The most likely tokens and all logits [K, D]; later ones follow `drawn` where it is given."""
        n = length - 1
        row_tokens, states = list(tokens[1:length]), self.states(tokens)[:n]
        if self.made.mask_id is not None:
            mask = self.fuse(self.t["mask_hidden"].view(1, -1))
            states = torch.cat([states, mask.expand(k - 1, -1)])
            outputs = self.forward([*row_tokens, *[self.made.mask_id] * (k - 1)], states)
            logits = self.logits(outputs[n - 1 :])
            return self.target_ids(logits.argmax(-1)).tolist(), logits
        found: list[int] = []
        rows: list[Tensor] = []
        for index in range(k):
            output = self.forward(row_tokens, states)[-1:]
            rows.append(self.logits(output)[0])
            found.append(int(self.target_ids(rows[-1].argmax())))
            row_tokens.append(found[-1] if drawn is None else drawn[index])
            states = torch.cat([states, self.normed(output) if self.made.norm_output else output])
        return found, torch.stack(rows)

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.made.config.get("transformer_layer_config", self.made.config).get("rms_norm_eps", EPS)
        return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids + self.t["d2t"][ids] if "d2t" in self.t else ids

    def normed(self, output: Tensor) -> Tensor:
        return output if self.made.method == "eagle" else self.rms(output, self.t["norm.weight"])

    def logits(self, output: Tensor) -> Tensor:
        return self.normed(output) @ self.head.T

    def forward(self, tokens: Sequence[int], states: Tensor) -> Tensor:
        t = self.t
        embedded = self.table[list(tokens)]
        if self.made.method == "eagle":
            u = torch.cat([embedded, states], dim=-1) @ t["fc.weight"].T + t.get("fc.bias", 0)
            u = self.finished(0, u, u)
        else:
            e = self.rms(embedded, t["layers.0.input_layernorm.weight"])
            s = self.rms(states, t["layers.0.hidden_norm.weight"]) if "layers.0.hidden_norm.weight" in t else states
            u = self.finished(0, s if self.made.norm_before_residual else states, torch.cat([e, s], dim=-1))
        for layer in range(1, self.made.num_layers):
            u = self.finished(layer, u, self.rms(u, t[f"layers.{layer}.input_layernorm.weight"]))
        return u

    def finished(self, layer: int, residual: Tensor, inputs: Tensor) -> Tensor:
        u = residual + self.attention(layer, inputs)
        x = self.rms(u, self.t[f"layers.{layer}.post_attention_layernorm.weight"])
        gate, up, down = (self.t[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return u + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def attention(self, layer: int, inputs: Tensor) -> Tensor:
        if self.made.latent is not None:
            return self.latent_attention(layer, inputs)
        heads, kv_heads, head_dim = self.made.heads

        def projected(name: str, x: Tensor) -> Tensor:
            prefix = f"layers.{layer}.self_attn.{name}_proj"
            return x @ self.t[f"{prefix}.weight"].T + self.t.get(f"{prefix}.bias", 0)

        q, k, v = (projected(name, inputs).view(len(inputs), -1, head_dim) for name in "qkv")
        if f"layers.{layer}.self_attn.q_norm.weight" in self.t:
            q, k = (self.rms(x, self.t[f"layers.{layer}.self_attn.{n}_norm.weight"]) for x, n in ((q, "q"), (k, "k")))
        positions = torch.arange(len(inputs)) / self.made.rope_factor
        q, k = rope(q, positions, self.made.theta), rope(k, positions, self.made.theta)
        later = torch.ones(len(inputs), len(inputs)).triu(1).bool()
        outputs = []
        for head in range(heads):
            group = head * kv_heads // heads
            scores = (q[:, head] @ k[:, group].T) * head_dim**-0.5
            outputs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, group])
        return projected("o", torch.cat(outputs, dim=-1))

    def latent_attention(self, layer: int, inputs: Tensor) -> Tensor:
        """Queries and keys of a part without positions and a rotated part; the keys' rotated part is one for all."""
        size, heads = self.made.latent, self.made.heads[0]
        nope, rotary, stem = size["qk_nope_head_dim"], size["qk_rope_head_dim"], f"layers.{layer}.self_attn."
        t = {name.removeprefix(stem): each for name, each in self.t.items() if name.startswith(stem)}
        if size["q_lora_rank"] is None:
            q = inputs @ t["q_proj.weight"].T
        else:
            latent = self.rms(inputs @ t["q_a_proj.weight"].T, t["q_a_layernorm.weight"])
            q = latent @ t["q_b_proj.weight"].T
        q = q.view(len(inputs), heads, nope + rotary)
        compressed = inputs @ t["kv_a_proj_with_mqa.weight"].T
        latent = self.rms(compressed[:, :-rotary], t["kv_a_layernorm.weight"])
        kv = (latent @ t["kv_b_proj.weight"].T).view(len(inputs), heads, nope + size["v_head_dim"])
        frequencies, amplitude, scale = yarn(size["yarn"], rotary, self.made.theta)
        q_rot = pairs_rotated(q[..., nope:], frequencies) * amplitude
        k_rot = pairs_rotated(compressed[:, None, -rotary:], frequencies)[:, 0] * amplitude
        later = torch.ones(len(inputs), len(inputs)).triu(1).bool()
        outputs = []
        for head in range(heads):
            scores = q[:, head, :nope] @ kv[:, head, :nope].T + q_rot[:, head] @ k_rot.T
            scores = scores * scale * (nope + rotary) ** -0.5
            outputs.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ kv[:, head, nope:])
        return torch.cat(outputs, dim=-1) @ t["o_proj.weight"].T


def yarn(scaling: dict[str, Any] | None, dim: int, theta: float) -> tuple[Tensor, float, float]:
    """Frequencies [dim / 2], the amplitude of rotated parts, and the factor on scores (YaRN, arXiv 2309.00071)."""
    plain = theta ** (-torch.arange(0, dim, 2) / dim)
    if scaling is None:
        return plain, 1.0, 1.0

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1

    def where(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(where(scaling["beta_fast"])), 0), min(math.ceil(where(scaling["beta_slow"])), dim - 1)
    stretched = ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
    frequencies = plain * (1 - stretched) + plain / scaling["factor"] * stretched
    both = magnitude(scaling["mscale_all_dim"])
    return frequencies, magnitude(scaling["mscale"]) / both, both**2


def pairs_rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    """x [T, heads, D] from position 0 on; neighbours are the pairs."""
    angle = torch.arange(len(x))[:, None] * frequencies
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, heads, D] at positions [T]; the two halves of each head are the pairs."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class ForcedEagle(Shown, Forced, EagleProposer):
    """EAGLE-1."""


class ForcedEagle3(Shown, Forced, Eagle3Proposer):
    """EAGLE-3 and P-EAGLE."""


class ForcedInDeviceForm(InDeviceForm, ForcedEagle3):
    """The same, on a device."""


class RecordingEagle(Recording, EagleProposer):
    """EAGLE-1."""


class RecordingEagle3(Recording, Eagle3Proposer):
    """EAGLE-3 and P-EAGLE."""
