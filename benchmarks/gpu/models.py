"""Checkpoints made here: nothing is downloaded.

Weights are random, but each token is followed by its successor, however a batch is rounded: see `put_in_circles`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ..peers.successors import CIRCLE, put_in_circles


@dataclass(frozen=True)
class Shape:
    """A model, and what it is asked for."""

    config: dict[str, int]
    batch_sizes: tuple[int, ...]
    prompt_len: int
    output_len: int
    max_model_len: int
    kv_gib: float | None = None  # for the largest batch, and so that the next engine finds room; None: by itself
    draft_vocab: int = 32000


POSITIONS = 131_072  # of every model: the small one drafts for the large one, whatever length that is run with
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPES = {
    "1B": Shape(LLAMA_1B | {"num_key_value_heads": 8, "vocab_size": 128256}, (1, 8, 64), 128, 128, 4096, 4.0),
    "8B": Shape(LLAMA_8B | {"num_key_value_heads": 8, "vocab_size": 128256}, (1, 8, 64), 1024, 96, 131_072, 20.0),
    "smoke": Shape(TINY | {"num_key_value_heads": 2, "vocab_size": 512}, (1, 2), 12, 8, 128, None, 256),
}


def config_of(shape: Shape, dtype: torch.dtype) -> LlamaConfig:
    """Of a target."""
    return LlamaConfig(
        **shape.config,
        max_position_embeddings=POSITIONS,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        dtype=dtype,
    )


def make_model(shape: Shape, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """A model in which each token is followed by its successor."""
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = put_in_circles(LlamaForCausalLM(config_of(shape, dtype)).eval())
    finally:
        torch.set_default_dtype(previous)
    model.generation_config.eos_token_id = None  # no contender ends early, and none checks for it
    model.generation_config.pad_token_id = 0
    return model


def checkpoint(folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device) -> Path:
    """The model's, made where it is missing."""

    def save(aside: Path) -> None:
        model = make_model(shape, dtype, device)
        model.save_pretrained(aside)
        read = (each.nbytes for name, each in model.named_parameters() if "embed_tokens" not in name)
        _note_bytes(aside, sum(read))

    return _made(folder, save)


def eagle3_checkpoint(folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device) -> Path:
    """A drafter's with random weights, in the form of speculators; made where it is missing."""

    def save(aside: Path) -> None:
        tensors = {name: _random(name, size, dtype, device) for name, size in _eagle3_sizes(shape).items()}
        read = sum(
            each.nbytes for name, each in tensors.items() if name != "fc.weight"
        )  # that one is read once a draft
        known = torch.arange(shape.config["vocab_size"]) < shape.draft_vocab
        tensors |= {"d2t": torch.zeros(shape.draft_vocab, dtype=torch.int64), "t2d": known}
        save_file(tensors, aside / "model.safetensors")
        (aside / "config.json").write_text(json.dumps(_eagle3_config(shape, dtype)), encoding="utf-8")
        _note_bytes(aside, read)

    return _made(folder, save)


def named(what: str, shape: Shape, dtype: torch.dtype) -> str:
    """Of a folder: another shape has another."""
    return f"{what}-{hashlib.sha256(f'{shape} {POSITIONS} {dtype} {CIRCLE}'.encode()).hexdigest()[:8]}"


def _made(folder: Path, save: Callable[[Path], None]) -> Path:
    if not folder.exists():  # a checkpoint that was not finished has another name
        aside = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save(aside)
        aside.rename(folder)
    return folder


def _note_bytes(folder: Path, count: int) -> None:
    (folder / "bytes.json").write_text(json.dumps({"weights": count}), encoding="utf-8")


def _random(name: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.ones(size, device=device) if len(size) == 1 else torch.randn(size, device=device) * size[-1] ** -0.5
    return made.to(dtype).cpu()


def _eagle3_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    c = shape.config
    hidden, wide, head = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // c["num_attention_heads"]
    kv = head * c["num_key_value_heads"]
    layer = {
        "hidden_norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.down_proj": (hidden, wide),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "self_attn.q_proj": (hidden, 2 * hidden),
        "self_attn.k_proj": (kv, 2 * hidden),
        "self_attn.v_proj": (kv, 2 * hidden),
        "self_attn.o_proj": (hidden, hidden),
    }
    others = {"fc": (hidden, 3 * hidden), "norm": (hidden,), "lm_head": (shape.draft_vocab, hidden)}
    return {f"layers.0.{name}.weight": size for name, size in layer.items()} | {
        f"{name}.weight": size for name, size in others.items()
    }


def _eagle3_config(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    count = shape.config["num_hidden_layers"]
    layer = config_of(shape, dtype).to_dict() | {"num_hidden_layers": 1, "model_type": "llama"}
    verifier = {"name_or_path": "made here", "architectures": ["LlamaForCausalLM"]}
    method = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": shape.draft_vocab,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, count // 2, count - 1],
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
    }
