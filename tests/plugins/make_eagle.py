"""EAGLE checkpoints with random weights in every publisher's layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import TINY
from safetensors.torch import load_file, save_file
from torch import Tensor

V, H, N = 4096, 256, 8  # of the tiny target
HEADS, KV_HEADS, HEAD_DIM, FFN, EPS = 4, 2, 32, 96, 1e-6
MASK_ID = 4084


@dataclass
class Made:
    """A checkpoint on disk, and in plain terms what a reader of the format would take it to be.

    `tensors` are by the names of the `layers.0.` layout; `stored` tells what they are called in the file.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    method: str = "eagle3"
    features: tuple[int | str, ...] = (2, 4, 5)
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, HEAD_DIM)
    theta: float = 10_000.0
    rope_factor: float = 1.0
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_id: int | None = None
    renamed: dict[str, str] = field(default_factory=dict)  # beginnings of names: ours -> the file's
    as_bin: bool = False
    latent: dict[str, Any] | None = None  # sizes and rotary scaling of multi-head latent attention

    def save(self) -> Made:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config))
        stored = {self._stored(name): tensor.contiguous() for name, tensor in self.tensors.items()}
        if self.as_bin:
            torch.save(stored, self.path / "pytorch_model.bin")
        else:
            save_file(stored, self.path / "model.safetensors")
        return self

    def _stored(self, name: str) -> str:
        for ours, theirs in self.renamed.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    @property
    def num_layers(self) -> int:
        return len({name.split(".")[1] for name in self.tensors if name.startswith("layers.")})


def trained(name: str = "eagle3") -> Made:
    """A packaged checkpoint."""
    path = TINY / name
    config = json.loads((path / "config.json").read_text())
    layers = config.get("transformer_layer_config", config)
    return Made(
        path,
        config,
        {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in load_file(path / "model.safetensors").items()
        },
        method=name,
        features=tuple(config["eagle_aux_hidden_state_layer_ids"]) if name == "eagle3" else ("final",),
        heads=(layers["num_attention_heads"], layers["num_key_value_heads"], layers["head_dim"]),
        theta=layers["rope_parameters"]["rope_theta"] if "rope_parameters" in layers else layers["rope_theta"],
        norm_before_residual=config.get("norm_before_residual", False),
    )


class Weights:
    """Random weights large enough for every part of the network to have a say in what is drafted."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return 2 * torch.randn(rows, columns, generator=self.generator) / columns**0.5

    def norm(self, size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self.generator)

    def bias(self, size: int) -> Tensor:
        return 0.5 * torch.randn(size, generator=self.generator)

    def layer(self, index: int, inputs: int, width: int = H) -> dict[str, Tensor]:
        """A layer without norms before its attention."""
        return {
            f"layers.{index}.{name}": tensor
            for name, tensor in {
                "self_attn.q_proj.weight": self.matrix(HEADS * HEAD_DIM, inputs),
                "self_attn.k_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, inputs),
                "self_attn.v_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, inputs),
                "self_attn.o_proj.weight": self.matrix(width, HEADS * HEAD_DIM),
                "post_attention_layernorm.weight": self.norm(width),
                "mlp.gate_proj.weight": self.matrix(FFN, width),
                "mlp.up_proj.weight": self.matrix(FFN, width),
                "mlp.down_proj.weight": self.matrix(width, FFN),
            }.items()
        }

    def eagle3(self, count: int = 3, num_layers: int = 1, width: int = H, embedding: int = H) -> dict[str, Tensor]:
        tensors = {"fc.weight": self.matrix(width, count * H), "norm.weight": self.norm(width)}
        tensors |= self.layer(0, embedding + width, width)
        tensors |= {
            "layers.0.input_layernorm.weight": self.norm(embedding),
            "layers.0.hidden_norm.weight": self.norm(width),
        }
        for index in range(1, num_layers):
            tensors |= self.layer(index, width, width)
            tensors[f"layers.{index}.input_layernorm.weight"] = self.norm(width)
        return tensors

    def vocabulary(self, num_ids: int = 640, width: int = H) -> dict[str, Tensor]:
        """A draft vocabulary that is no contiguous part of the target's: own head, offsets and membership."""
        ids = torch.randperm(V, generator=self.generator)[:num_ids].sort().values
        return {
            "lm_head.weight": self.matrix(num_ids, width),
            "d2t": ids - torch.arange(num_ids),
            "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True),
        }


def layer_fields(**changed: Any) -> dict[str, Any]:
    """The part of a configuration that all publishers share."""
    return {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    } | changed


def safeailab_eagle1(path: Path) -> Made:
    """EAGLE-1 as its authors publish it: no input norm, no final norm, no head, no embedding."""
    weights = Weights(1)
    tensors = {"fc.weight": weights.matrix(H, 2 * H), "fc.bias": weights.bias(H)} | weights.layer(0, H)
    config = layer_fields() | {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "float16",
        "rope_scaling": None,
        "pretraining_tp": 1,
    }
    return Made(path, config, tensors, method="eagle", features=("final",), as_bin=True)


def eagle1_with_target_embedding(path: Path) -> Made:
    """With a frozen copy of the target's embedding, as in the LLaMA-3 files, and computed rotary frequencies."""
    made = safeailab_eagle1(path)
    made.config["rope_theta"] = 20_000.0
    made.theta = 20_000.0
    made.tensors["embed_tokens.weight"] = load_file(TINY / "target" / "model.safetensors")["model.embed_tokens.weight"]
    made.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(HEAD_DIM // 2)
    return made


def eagle1_with_biased_attention(path: Path) -> Made:
    """Of a Qwen2 target: queries, keys and values have biases, the output projection none; the fc none either."""
    made = safeailab_eagle1(path)
    made.config |= {"qkv_bias": True, "bias": False}
    weights = Weights(2)
    made.tensors.pop("fc.bias")
    for name, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        made.tensors[f"layers.0.self_attn.{name}_proj.bias"] = weights.bias(size * HEAD_DIM)
    return made


def wrapped_eagle1(path: Path) -> Made:
    """In vLLM's form: the configuration nested, no bias of the fc, safetensors; two layers, and a wider embedding."""
    made = safeailab_eagle1(path)
    made.config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": made.config}
    made.as_bin = False
    weights = Weights(3)
    made.tensors.pop("fc.bias")
    made.tensors |= weights.layer(1, H) | {
        "layers.1.input_layernorm.weight": weights.norm(H),
        "embed_tokens.weight": weights.matrix(V, 96),
        "fc.weight": weights.matrix(H, 96 + H),
    }
    return made


def safeailab(path: Path) -> Made:
    """EAGLE-3 as its authors publish it: `midlayer`, a draft vocabulary, no layer ids, a wrong number of layers."""
    weights = Weights()
    config = layer_fields(num_hidden_layers=40) | {
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": 640,
        "torch_dtype": "float16",
    }
    tensors = weights.eagle3() | weights.vocabulary()
    return Made(path, config, tensors, renamed={"layers.0.": "midlayer."}, as_bin=True)


def safeailab_same_vocabulary(path: Path) -> Made:
    """Without a draft vocabulary, recognised by its tensors alone; linear scaling of positions; the target's head."""
    config = layer_fields() | {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    return Made(path, config, Weights().eagle3(), renamed={"layers.0.": "midlayer."}, rope_factor=2.0)


def specforge(path: Path) -> Made:
    """SpecForge: ids of layer outputs in `eagle_config`, a norm for each feature, an all-zero map of the vocabulary."""
    weights = Weights(4)
    config = layer_fields() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": V,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5], "use_aux_hidden_state": True},
        "fc_norm": True,
        "rope_theta": 30_000,
        "target_hidden_size": H,
        "num_aux_hidden_states": 3,
    }
    tensors = weights.eagle3() | {f"fc_norm.{j}.weight": weights.norm(H) for j in range(3)}
    tensors |= {
        "lm_head.weight": weights.matrix(V, H),
        "d2t": torch.zeros(V, dtype=torch.int64),
        "t2d": torch.ones(V, dtype=torch.bool),
    }
    return Made(path, config, tensors, features=(2, 3, 6), theta=30_000.0, renamed={"layers.0.": "midlayer."})


def specforge_older_norms(path: Path) -> Made:
    """The same norms under their older names, and no word of them in the configuration."""
    made = specforge(path)
    made.config.pop("fc_norm")
    made.renamed |= {f"fc_norm.{j}.": f"aux_norm_{name}." for j, name in enumerate(("low", "mid", "high"))}
    return made


def specforge_norm_before_fc(path: Path) -> Made:
    """One norm over all features, and the normed state fed back."""
    made = specforge(path)
    made.config |= {"fc_norm": False, "norm_before_fc": True, "norm_output": True}
    made.norm_output = True
    for j in range(3):
        made.tensors.pop(f"fc_norm.{j}.weight")
    made.tensors["input_norm.weight"] = Weights(5).norm(3 * H)
    return made


def angelslim(path: Path) -> Made:
    """AngelSlim: the same tensors behind another architecture's name."""
    made = safeailab(path)
    made.config |= {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 1}
    return made


def modelopt(path: Path) -> Made:
    """ModelOpt: `layers.0`, no membership mask; ids that end at the target's last layer are boundaries; two layers."""
    weights = Weights(6)
    config = layer_fields(num_hidden_layers=2) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 640,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8], "use_aux_hidden_state": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": 25_000.0},
        "rope_theta": 500.0,
    }
    tensors = weights.eagle3(count=2, num_layers=2) | weights.vocabulary()
    tensors.pop("t2d")
    return Made(path, config, tensors, features=(1, 8), theta=25_000.0)


def modelopt_final_state(path: Path) -> Made:
    """ModelOpt without auxiliary hidden states: the target's final one, neither projected nor normed."""
    made = modelopt(path)
    made.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": False}
    made.config["num_hidden_layers"] = 1
    made.tensors = Weights(7).eagle3() | Weights(7).vocabulary()
    made.features = ("final",)
    for name in ("fc.weight", "layers.0.hidden_norm.weight", "t2d"):
        made.tensors.pop(name)
    return made


def speculators(path: Path) -> Made:
    """speculators: layers nested, ids of boundaries, the residual after the norm, what verifies it left in."""
    weights = Weights(8)
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "draft_vocab_size": 640,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"name_or_path": "somewhere/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer_fields(attention_bias=False, mlp_bias=False)
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    }
    tensors = weights.eagle3() | weights.vocabulary() | {"embed_tokens.weight": weights.matrix(V, H)}
    tensors |= {"verifier_norm.weight": torch.ones(H), "verifier_lm_head.weight": torch.ones(640, H)}
    return Made(path, config, tensors, features=(1, 3, 6), norm_before_residual=True)


def speculators_qwen3(path: Path) -> Made:
    """An older file with a layer of the qwen3 type and without the newer flags: the residual is then not normed."""
    made = speculators(path)
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        made.config.pop(name)
    layers = made.config["transformer_layer_config"]
    layers |= {"model_type": "qwen3", "rope_theta": 40_000.0, "rope_scaling": None}
    layers.pop("rope_parameters")
    made.norm_before_residual, made.theta = False, 40_000.0
    for name in ("q", "k"):
        made.tensors[f"layers.0.self_attn.{name}_norm.weight"] = Weights(9).norm(HEAD_DIM)
    return made


def speculators_biased(path: Path) -> Made:
    """Two layers whose four attention projections all have biases; four features; the normed state fed back."""
    made = speculators(path)
    made.config |= {"norm_output": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4, 8]}
    made.config["transformer_layer_config"] |= {"num_hidden_layers": 2, "attention_bias": True}
    weights = Weights(10)
    made.tensors |= weights.eagle3(count=4, num_layers=2)
    for layer in range(2):
        for name, size in (("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM), ("o", H)):
            made.tensors[f"layers.{layer}.self_attn.{name}_proj.bias"] = weights.bias(size)
    made.norm_output, made.features = True, (0, 2, 4, 8)
    return made


def narrow(path: Path) -> Made:
    """A network of another width than the target's, beside the target's own embedding."""
    made = speculators(path)
    made.config["transformer_layer_config"]["hidden_size"] = 64
    made.config["target_hidden_size"] = H
    weights = Weights(11)
    made.tensors = weights.eagle3(width=64) | weights.vocabulary(width=64)
    return made


def peagle(path: Path) -> Made:
    """P-EAGLE by speculators: two layers, a mask for the tokens and states that are not known yet."""
    made = speculators(path)
    made.config |= {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "mask_token_id": MASK_ID,
        "norm_before_residual": False,
    }
    made.config["transformer_layer_config"]["num_hidden_layers"] = 2
    weights = Weights(12)
    made.tensors |= weights.eagle3(num_layers=2) | {"mask_hidden": weights.matrix(1, 3 * H)[None] * 20}
    made.norm_before_residual, made.mask_id = False, MASK_ID
    return made


def flat_peagle(path: Path) -> Made:
    """P-EAGLE with a flat configuration and vLLM's name of the mask token; a flat mask, norms before the projection."""
    made = specforge(path)
    made.config |= {"architectures": ["PeagleLlamaForCausalLM"], "pard_token": 17}
    made.tensors["mask_hidden"] = Weights(13).matrix(1, 3 * H)[0] * 20
    made.mask_id = 17
    return made


LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1,
    "mscale": 0.7, "mscale_all_dim": 1.0,
}  # fmt: skip


def latent_attention(weights: Weights, inputs: int, *, q_lora_rank: int | None) -> dict[str, Tensor]:
    """The attention's tensors by the names behind `self_attn.`."""
    size, outputs = LATENT, HEADS * (LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"])
    tensors = {
        "kv_a_proj_with_mqa.weight": weights.matrix(size["kv_lora_rank"] + size["qk_rope_head_dim"], inputs),
        "kv_a_layernorm.weight": weights.norm(size["kv_lora_rank"]),
        "kv_b_proj.weight": weights.matrix(
            HEADS * (size["qk_nope_head_dim"] + size["v_head_dim"]), size["kv_lora_rank"]
        ),
        "o_proj.weight": weights.matrix(H, HEADS * size["v_head_dim"]),
    }
    if q_lora_rank is None:
        return tensors | {"q_proj.weight": weights.matrix(outputs, inputs)}
    return tensors | {
        "q_a_proj.weight": weights.matrix(q_lora_rank, inputs),
        "q_a_layernorm.weight": weights.norm(q_lora_rank),
        "q_b_proj.weight": weights.matrix(outputs, q_lora_rank),
    }


def latent(path: Path) -> Made:
    """Kimi's: latent attention in `midlayer`, neighbouring rotary pairs with YaRN, EAGLE-3.1's norms and feedback."""
    made, weights = specforge(path), Weights(14)
    made.config |= LATENT | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
    made.config |= {"norm_output": True, "rope_scaling": YARN, "rms_norm_eps": 1e-2}
    made.norm_output, made.latent = True, LATENT | {"yarn": YARN}
    with_latent_attention(made, weights)
    return made


def latent_flat(path: Path) -> Made:
    """ModelOpt's: two layers, queries of one projection, no scaling of positions."""
    made, weights = modelopt(path), Weights(15)
    made.config |= LATENT | {"q_lora_rank": None, "architectures": ["Eagle3DeepseekV3ForCausalLM"]}
    made.latent = LATENT | {"q_lora_rank": None, "yarn": None}
    with_latent_attention(made, weights)
    return made


def with_latent_attention(made: Made, weights: Weights) -> None:
    for index in range(made.num_layers):
        stem = f"layers.{index}.self_attn."
        made.tensors = {name: tensor for name, tensor in made.tensors.items() if not name.startswith(stem)}
        rank = made.latent["q_lora_rank"]
        ours = latent_attention(weights, H if index else 2 * H, q_lora_rank=rank)
        made.tensors |= {stem + name: tensor for name, tensor in ours.items()}


MAKERS = (
    safeailab_eagle1,
    eagle1_with_target_embedding,
    eagle1_with_biased_attention,
    wrapped_eagle1,
    safeailab,
    safeailab_same_vocabulary,
    specforge,
    specforge_older_norms,
    specforge_norm_before_fc,
    angelslim,
    modelopt,
    modelopt_final_state,
    speculators,
    speculators_qwen3,
    speculators_biased,
    narrow,
    peagle,
    flat_peagle,
    latent,
    latent_flat,
)
