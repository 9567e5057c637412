"""Targets with a multi-token-prediction module in each publisher's layout, and its drafts computed in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import TINY, TargetStates
from replaying import Forced, InDeviceForm, Recording
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.plugins.mtp.proposer import MtpProposer

H, V = 256, 4096
SMALL_V = 512

# neutral name -> published name; "layer" is the prefix of the decoder layer, {i} the module's number
NEXTN = {
    "enorm": "model.layers.{i}.enorm",
    "hnorm": "model.layers.{i}.hnorm",
    "proj": "model.layers.{i}.eh_proj",
    "norm": "model.layers.{i}.shared_head.norm",
    "head": "model.layers.{i}.shared_head.head",
    "embed": "model.layers.{i}.embed_tokens",
    "layer": "model.layers.{i}.",
}
MIMO = {
    "enorm": "model.mtp_layers.{i}.token_layernorm",
    "hnorm": "model.mtp_layers.{i}.hidden_layernorm",
    "proj": "model.mtp_layers.{i}.input_proj",
    "norm": "model.mtp_layers.{i}.final_layernorm",
    "layer": "model.mtp_layers.{i}.",
}
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "proj": "mtp.fc",
    "norm": "mtp.norm",
    "layer": "mtp.layers.{i}.",
}
ERNIE = {
    "enorm": "model.mtp_emb_norm.{i}",
    "hnorm": "model.mtp_hidden_norm.{i}",
    "proj": "model.mtp_linear_proj.{i}",
    "layer": "model.mtp_block.{i}.",
}
SPECULATORS = {
    "enorm": "mtp_layers.{i}.token_layernorm",
    "hnorm": "mtp_layers.{i}.hidden_layernorm",
    "proj": "mtp_layers.{i}.input_proj",
    "norm": "mtp_layers.{i}.final_layernorm",
    "head": "lm_head",
    "embed": "embed_tokens",
    "layer": "mtp_layers.{i}.",
}


class ForcedMtp(Forced, MtpProposer):
    pass


class ForcedInDeviceForm(InDeviceForm, ForcedMtp):
    pass


class RecordingMtp(Recording, MtpProposer):
    pass


Layer = Callable[[Tensor], Tensor]  # [T, H] -> [T, H], causal, positions from 0


@dataclass
class Module:
    """One module: its parts by neutral names, its layer's tensors as published, and how it is run."""

    parts: dict[str, Tensor]
    layer_tensors: dict[str, Tensor]
    layer: Layer
    eps: float = 1e-6
    hidden_first: bool = False
    recycles_normed: bool = True

    def tensors(self, layout: dict[str, str], index: int) -> dict[str, Tensor]:
        """Under a publisher's names."""
        parts = {f"{layout[part]}.weight": tensor for part, tensor in self.parts.items()}
        whole = parts | {layout["layer"] + name: tensor for name, tensor in self.layer_tensors.items()}
        return {name.replace("{i}", str(index)): tensor.clone() for name, tensor in whole.items()}

    def normed(self, states: Tensor, part: str) -> Tensor:
        if part not in self.parts:
            return states
        return self.parts[part] * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)

    @torch.no_grad()
    def rollout(
        self, committed: list[int], k: int, target: TargetStates, drafted: list[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """K draft tokens (those given, else the likeliest) and the logits [K, V] of each. Nothing is cached."""
        hidden = target.of(committed[:-1])["final"]
        table, head = self.parts.get("embed", target.embedding), self.parts.get("head", target.head)
        tokens, logits = committed[1:], []
        for place in range(k):
            pair = [self.normed(table[tokens], "enorm"), self.normed(hidden, "hnorm")]
            rows = torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1) @ self.parts["proj"].T
            block = self.layer(rows)[-1]
            logits.append(head @ self.normed(block, "norm"))
            tokens = [*tokens, int(logits[-1].argmax()) if drafted is None else drafted[place]]
            recycled = self.normed(block, "norm") if self.recycles_normed else block
            hidden = torch.cat([hidden, recycled[None]])
        return tokens[len(committed) - 1 :], torch.stack(logits)

    def draft(self, target: TargetStates) -> Callable[[list[int], int], list[int]]:
        """What is drafted greedily after committed tokens."""
        return lambda committed, k: self.rollout(committed, k, target)[0]


@dataclass
class Several:
    """Modules that each draft the token at their own depth. Every one reads every row; nothing is cached."""

    modules: list[Module]

    @torch.no_grad()
    def rollout(
        self, committed: list[int], k: int, target: TargetStates, drafted: list[int] | None = None
    ) -> tuple[list[int], Tensor]:
        """See `Module.rollout`."""
        hidden, tokens, logits = target.of(committed[:-1])["final"], list(committed), []
        for depth, module in enumerate(self.modules[:k]):
            table, head = module.parts.get("embed", target.embedding), module.parts.get("head", target.head)
            ahead = tokens[1 + depth :]  # as many as there are rows
            pair = [module.normed(table[ahead], "enorm"), module.normed(hidden, "hnorm")]
            rows = torch.cat(pair[::-1] if module.hidden_first else pair, dim=-1) @ module.parts["proj"].T
            block = module.layer(rows)
            logits.append(head @ module.normed(block[-1], "norm"))
            tokens.append(int(logits[-1].argmax()) if drafted is None else drafted[depth])
            hidden = module.normed(block, "norm") if module.recycles_normed else block
        return tokens[len(committed) :], torch.stack(logits)

    def tensors(self, layout: dict[str, str], first: int) -> dict[str, Tensor]:
        """Of all modules, numbered from `first` on."""
        return {
            name: each
            for index, module in enumerate(self.modules)
            for name, each in module.tensors(layout, first + index).items()
        }

    def draft(self, target: TargetStates) -> Callable[[list[int], int], list[int]]:
        """See `Module.draft`."""
        return lambda committed, k: self.rollout(committed, k, target)[0]


def tiny_module(seed: int = 0, **how: Any) -> Module:
    """A layer of the tiny target's kind and parts that lean on the hidden state, so that some drafts are accepted."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.05) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    heads, kv_heads, width, inner = 4, 2, 64, 640
    layer = {
        "self_attn.q_proj.weight": random(heads * width, H),
        "self_attn.k_proj.weight": random(kv_heads * width, H),
        "self_attn.v_proj.weight": random(kv_heads * width, H),
        "self_attn.o_proj.weight": random(H, heads * width),
        "self_attn.q_norm.weight": 1 + random(width, scale=0.2),
        "self_attn.k_norm.weight": 1 + random(width, scale=0.2),
        "mlp.gate_proj.weight": random(inner, H),
        "mlp.up_proj.weight": random(inner, H),
        "mlp.down_proj.weight": random(H, inner),
        "input_layernorm.weight": 1 + random(H, scale=0.2),
        "post_attention_layernorm.weight": 1 + random(H, scale=0.2),
    }
    lean = torch.cat([torch.eye(H), torch.eye(H)], dim=1)
    parts = {
        "enorm": 1 + random(H, scale=0.2),
        "hnorm": 1 + random(H, scale=0.2),
        "proj": lean + random(H, 2 * H),
        "norm": 1 + random(H, scale=0.2),
    }
    return Module(parts, layer, lambda rows: tiny_layer(layer, rows), **how)


def fitted_module(target: TargetStates, texts: list[list[int]], **how: Any) -> Module:
    """A projection fitted to texts that it is tried on, so that drafts are accepted, and a layer that adds little."""
    module = tiny_module(**how)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        module.layer_tensors[name].mul_(0.1)
    module.parts["norm"] = torch.ones(H)
    inputs, outputs = [], []
    for text in texts:
        final = target.of(text)["final"]
        pair = [module.normed(target.embedding[text[1:-1]].detach(), "enorm"), module.normed(final[:-2], "hnorm")]
        inputs.append(torch.cat(pair[::-1] if module.hidden_first else pair, dim=-1))
        outputs.append(final[1:-1])
    x, y = torch.cat(inputs), torch.cat(outputs)
    module.parts["proj"] = torch.linalg.solve(x.T @ x + torch.eye(2 * H), x.T @ y).T.contiguous()
    return module


def packaged_module() -> Module:
    """The trained module in the tiny target's folder."""
    stored = {name: each.float() for name, each in load_file(TINY / "target" / "mtp.safetensors").items()}
    prefix = QWEN["layer"].replace("{i}", "0")
    layer = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
    parts = {part: stored[f"{QWEN[part]}.weight"] for part in ("enorm", "hnorm", "proj", "norm")}
    return Module(parts, layer, lambda rows: tiny_layer(layer, rows))


def tiny_layer(t: dict[str, Tensor], rows: Tensor, theta: float = 10_000.0) -> Tensor:
    """Grouped-query attention with normed heads, and a gated MLP."""

    def norm(x: Tensor, name: str) -> Tensor:
        return t[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    x = norm(rows, "input_layernorm.weight")
    q, k, v = ((x @ t[f"self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, 64)) for p in "qkv")
    q, k = rotated(norm(q, "self_attn.q_norm.weight")), rotated(norm(k, "self_attn.k_norm.weight"))
    k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    rows = rows + mixed @ t["self_attn.o_proj.weight"].T
    x = norm(rows, "post_attention_layernorm.weight")
    gate = x @ t["mlp.gate_proj.weight"].T
    return rows + (gate * gate.sigmoid() * (x @ t["mlp.up_proj.weight"].T)) @ t["mlp.down_proj.weight"].T


def tiny_target(directory: Path, tensors: dict[str, Tensor] | None, **config: Any) -> Path:
    """The tiny target with these tensors in a file beside its own."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / file).symlink_to(TINY / "target" / file)
    stated = json.loads((TINY / "target" / "config.json").read_text())
    stated.pop("mtp_num_hidden_layers", None)
    (directory / "config.json").write_text(json.dumps(stated | config))
    if tensors is not None:
        save_file(tensors, directory / "mtp.safetensors")
    return directory


MOE_SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 4,
        "use_qk_norm": True,
    },
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4},
    "ernie4_5_moe": {"num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
}


def moe_config(model_type: str, **changes: Any) -> Any:
    """Two layers of a family, small, with a rotary base of its own."""
    common = {
        "vocab_size": SMALL_V,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if model_type == "ernie4_5_moe":
        del common["num_experts_per_tok"]
    return AutoConfig.for_model(model_type, **(common | MOE_SHAPES[model_type] | changes))


def random_model(config: Any, seed: int) -> Any:
    """With weights large enough that every part of a layer counts."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
        else:
            tensor.copy_((0.02 if "correction_bias" in name else 0.12) * torch.randn_like(tensor))
    return model


def moe_target(directory: Path, model_type: str) -> Path:
    """A random target of a family, saved as published."""
    random_model(moe_config(model_type), 1).save_pretrained(directory)
    return directory


ONE_EXPERT_LAYER = {
    "deepseek_v3": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "qwen3_moe": {},
    "ernie4_5_moe": {"moe_layer_start_index": 0, "moe_layer_end_index": 0},
}


def moe_module(model_type: str, scratch: Path, *, dense: bool = False, **how: Any) -> Module:
    """A module whose layer is the library's own, with experts unless `dense`."""
    kind = {"first_k_dense_replace": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1, "mlp_only_layers": [0]}
    config = moe_config(model_type, num_hidden_layers=1, **(kind if dense else ONE_EXPERT_LAYER[model_type]))
    model = random_model(config, 2)
    model.save_pretrained(scratch)
    prefix = "model.layers.0."
    stored = load_file(scratch / "model.safetensors")
    layer = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
    generator = torch.Generator().manual_seed(3)
    parts = {name: 1 + 0.2 * torch.randn(64, generator=generator) for name in ("enorm", "hnorm", "norm")}
    parts["proj"] = 0.1 * torch.randn(64, 128, generator=generator)
    return Module(parts, layer, library_layer(model.model), eps=config.rms_norm_eps, **how)


def library_layer(decoder: Any) -> Layer:
    """Layer 0 of a transformers decoder over whole sequences."""

    def run(rows: Tensor) -> Tensor:
        positions = torch.arange(len(rows))[None]
        mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
        rotary = decoder.rotary_emb(rows[None], positions)
        output = decoder.layers[0](rows[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return (output if isinstance(output, Tensor) else output[0])[0]

    return run
