"""DFlash checkpoints with random weights in every publisher's layout, and the network once more in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import TINY, TargetStates
from replaying import Forced as ForcedDrafts
from replaying import InDeviceForm, Shown
from replaying import Recording as RecordedDrafts
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.plugins.dflash.proposer import DFlashProposer

V, H, N = 4096, 256, 8  # of the tiny target
MASK_ID = 4084
BLOCK = 9
HEADS, KV_HEADS, HEAD_DIM, FFN, EPS = 4, 2, 32, 96, 1e-6


@dataclass
class Made:
    """A checkpoint on disk, and in plain terms what a reader of the format would take it to be."""

    path: Path
    boundaries: tuple[int, ...] = (2, 4, 5)
    block_size: int = BLOCK
    theta: float = 10_000.0
    causal: tuple[bool, ...] = (False, False)
    windows: tuple[int | None, ...] = (None, None)
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD_DIM)
    first_slot: int = 1
    neighbours: bool = False  # rotary pairs lie side by side
    mask_id: int = MASK_ID
    mask_row: Tensor | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def save(self) -> Made:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, self.path / "model.safetensors")
        return self


def trained() -> Made:
    """The packaged checkpoint."""
    path = TINY / "dflash"
    config = json.loads((path / "config.json").read_text())
    layers = config["transformer_layer_config"]
    return Made(
        path=path,
        boundaries=tuple(config["aux_hidden_state_layer_ids"]),
        block_size=config["block_size"],
        theta=layers["rope_parameters"]["rope_theta"],
        causal=(False,) * layers["num_hidden_layers"],
        windows=(None,) * layers["num_hidden_layers"],
        heads=(layers["num_attention_heads"], layers["num_key_value_heads"], layers["head_dim"]),
        mask_id=config["mask_token_id"],
        config=config,
        tensors={name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()},
    )


def layer_fields(width: int = H, num_layers: int = 2) -> dict[str, Any]:
    """The draft layers' part of any layout."""
    return {
        "model_type": "qwen3",
        "vocab_size": V,
        "hidden_size": width,
        "intermediate_size": FFN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "layer_types": ["full_attention"] * num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


def random_tensors(num_features: int = 3, width: int = H, num_layers: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Weights large enough for every part of the network to have a say in what is drafted."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return 2 * torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(width, num_features * H),
        "hidden_norm.weight": norm(width),
        "norm.weight": norm(width),
    }
    for layer in range(num_layers):
        tensors |= {
            f"layers.{layer}.{name}": tensor
            for name, tensor in {
                "input_layernorm.weight": norm(width),
                "post_attention_layernorm.weight": norm(width),
                "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, width),
                "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, width),
                "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, width),
                "self_attn.o_proj.weight": matrix(width, HEADS * HEAD_DIM),
                "self_attn.q_norm.weight": norm(HEAD_DIM),
                "self_attn.k_norm.weight": norm(HEAD_DIM),
                "mlp.gate_proj.weight": matrix(FFN, width),
                "mlp.up_proj.weight": matrix(FFN, width),
                "mlp.down_proj.weight": matrix(width, FFN),
            }.items()
        }
    return tensors


def z_lab(path: Path) -> Made:
    """z-lab, SpecForge and ModelOpt: a flat configuration, `dflash_config` in it, ids of layer outputs."""
    config = layer_fields() | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [1, 3, 4]},
        "num_target_layers": N,
        "rope_theta": 10_000,
        "rope_scaling": None,
        "dtype": "bfloat16",
    }
    return Made(path, config=config, tensors=random_tensors())


def flattened(path: Path) -> Made:
    """The same with the fields of `dflash_config` at the top level."""
    made = z_lab(path)
    made.config |= made.config.pop("dflash_config")
    return made


def speculators(path: Path) -> Made:
    """speculators: layers nested, ids of boundaries."""
    layers = layer_fields() | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "mask_token_id": MASK_ID,
        "draft_vocab_size": V,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
            "verifier": {"name_or_path": "somewhere/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layers,
    }
    return Made(path, config=config, tensors=random_tensors())


def speculators_reduced(path: Path, num_ids: int = 640) -> Made:
    """speculators with a draft vocabulary smaller than the target's: own head, offsets, and the trainer's mask."""
    made = speculators(path)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(V, generator=generator)[:num_ids].sort().values
    made.config["draft_vocab_size"] = num_ids
    made.tensors |= {
        "lm_head.weight": torch.randn(num_ids, H, generator=generator) / H**0.5,
        "d2t": ids - torch.arange(num_ids),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
        "verifier_norm.weight": torch.ones(H),
        "verifier_lm_head.weight": torch.ones(num_ids, H),
    }
    return made


class Replay:
    """What a checkpoint drafts, from whole sequences in fp32: no cache, no steps, nothing of the engine."""

    def __init__(self, made: Made, target: TargetStates) -> None:
        self.made, self.target, self.t = made, target, made.tensors
        self._of: dict[tuple[int, ...], dict[int | str, Tensor]] = {}

    def features(self, tokens: Sequence[int]) -> Tensor:
        """[T, A*H], of every position of a sequence."""
        key = tuple(tokens)
        if key not in self._of:
            self._of[key] = self.target.of(tokens)
        return torch.cat([self._of[key][k] for k in self.made.boundaries], dim=-1)

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], length: int, k: int, context: int | None = None) -> list[int]:
        """The K tokens after the first `length` of a sequence. `context`: rows seen; None: all but the last."""
        logits = self.logits(tokens, length, k, length - 1 if context is None else context)
        ids = logits.argmax(-1)
        return (ids + self.t["d2t"][ids] if "d2t" in self.t else ids).tolist()

    def logits(self, tokens: Sequence[int], length: int, k: int, context: int) -> Tensor:
        return self.head(self.outputs(tokens, length, k, context)[self.made.first_slot :])

    def head(self, outputs: Tensor) -> Tensor:
        """[n, D]"""
        return outputs @ self.t.get("lm_head.weight", self.target.head).T

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """[n, h]"""
        return self.t.get("embed_tokens.weight", self.target.embedding)[torch.as_tensor(tokens)]

    def context(self, tokens: Sequence[int], context: int) -> Tensor:
        """The context rows of the first positions, [context, h]."""
        return rms(self.features(tokens)[:context] @ self.t["fc.weight"].T, self.t["hidden_norm.weight"])

    def outputs(self, tokens: Sequence[int], length: int, k: int, context: int) -> Tensor:
        """Every slot of a block that drafts K tokens, behind the final norm: [W, h]."""
        made, t = self.made, self.t
        n = length - 1
        rows = self.context(tokens, context)
        mask_row = self.embed([made.mask_id])[0] if made.mask_row is None else made.mask_row
        width = k + made.first_slot
        y = torch.stack([self.embed([tokens[n]])[0], *[mask_row] * (width - 1)])
        for layer in range(len(made.causal)):
            y = self.layer(layer, y, rows, n)
        return rms(y, t["norm.weight"])

    def layer(self, layer: int, y: Tensor, rows: Tensor, n: int) -> Tensor:
        t, stem = self.t, f"layers.{layer}"

        def mlp(s: Tensor) -> Tensor:
            gate, up, down = (t[f"{stem}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            return (torch.nn.functional.silu(s @ gate.T) * (s @ up.T)) @ down.T

        s = rms(y, t[f"{stem}.input_layernorm.weight"])
        y = y + self.sublayer(layer, "self_attn", s, lambda s: self.attention(layer, s, rows, n))
        return y + self.sublayer(layer, "mlp", rms(y, t[f"{stem}.post_attention_layernorm.weight"]), mlp)

    def sublayer(self, layer: int, name: str, inputs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What a sublayer adds, [W, h]."""
        return run(inputs)

    def attention(self, layer: int, s: Tensor, rows: Tensor, n: int) -> Tensor:
        t, (heads, kv_heads, head_dim) = self.t, self.made.heads
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        wq, wk, wv, wo, nq, nk = (t[f"layers.{layer}.self_attn.{name}.weight"] for name in names)
        slots = n + torch.arange(len(s))
        seen = torch.arange(len(rows))
        q = rope(rms((s @ wq.T).view(-1, heads, head_dim), nq), slots, self.made)
        keys = torch.cat([rows @ wk.T, s @ wk.T]).view(-1, kv_heads, head_dim)
        keys = rope(rms(keys, nk), torch.cat([seen, slots]), self.made)
        values = torch.cat([rows @ wv.T, s @ wv.T]).view(-1, kv_heads, head_dim)
        visible = torch.ones(len(s), len(keys), dtype=torch.bool)
        if self.made.causal[layer]:
            visible[:, len(rows) :] = torch.ones(len(s), len(s)).tril().bool()
        window = self.made.windows[layer]
        if window is not None:
            visible[:, : len(rows)] &= seen >= n - window
        outputs = []
        for head in range(heads):
            group = head * kv_heads // heads
            scores = (q[:, head] @ keys[:, group].T) * head_dim**-0.5
            outputs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values[:, group])
        return torch.cat(outputs, dim=-1) @ wo.T


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rope(x: Tensor, positions: Tensor, made: Made) -> Tensor:
    """x [T, heads, D] at positions [T]; the two halves of each head are the pairs, or each two neighbours."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * made.theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if made.neighbours else (x[..., :half], x[..., half:])
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, dim=-1).flatten(-2) if made.neighbours else torch.cat(turned, dim=-1)


class Forced(Shown, ForcedDrafts, DFlashProposer):
    pass


class ForcedInDeviceForm(InDeviceForm, Forced):
    pass


class Recording(RecordedDrafts, DFlashProposer):
    pass
