"""Draft layers with multi-head latent attention (MLA, arXiv 2405.04434): those of DeepSeek-V3 in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NORMS = {"q_a_layernorm": "q_lora_rank", "kv_a_layernorm": "kv_lora_rank"}
_FLAGS = "mla_"  # at the beginning of keys: variants of the attention that some targets' heads have


def is_latent(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the configuration states latent attention. Raises CheckpointError SD-E171."""
    return checkpoint.get(prefix + "kv_lora_rank", int, None) is not None


def latent_config(checkpoint: Checkpoint, prefix: str, num_layers: int) -> dict[str, Any]:
    """The fields that differ from those of other draft layers. The MLP is dense, whatever the target's is.

    Raises Refusal for a flag that is not implemented; CheckpointError: SD-E170 for a missing size, SD-E171.
    """
    stated = checkpoint.config if not prefix else checkpoint.get(prefix.rstrip("."), dict)
    flags = sorted(name for name, value in stated.items() if name.startswith(_FLAGS) and value)
    if flags:
        reason = f"its latent attention has {', '.join(flags)}, which is not implemented"
        raise Refusal(reason, "a head whose latent attention is DeepSeek-V3's")
    sizes = {name: checkpoint.get(prefix + name, int) for name in _SIZES}
    return sizes | {
        "model_type": "deepseek_v3",
        "q_lora_rank": checkpoint.get(prefix + "q_lora_rank", int, None),
        "num_key_value_heads": checkpoint.get(prefix + "num_attention_heads", int),
        "head_dim": sizes["qk_rope_head_dim"],  # what transformers makes rotary tables for
        "first_k_dense_replace": num_layers,
    }


def give_eps(layers: nn.ModuleList, config: Mapping[str, Any]) -> None:
    """Give the norms of latents the configured epsilon, as vLLM does; transformers has its own."""
    for layer in layers:
        for name, size in _NORMS.items():
            if config.get(size) is not None:
                setattr(layer.self_attn, name, nn.RMSNorm(config[size], eps=config["rms_norm_eps"]))
