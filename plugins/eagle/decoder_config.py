"""The configuration of the draft layers, gaps filled as the formats mean them.

Those with multi-head latent attention (MLA, arXiv 2405.04434) are the layers of DeepSeek-V3 in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer.kv_shape import layers_config

USUAL_ROPE_THETA = 10_000.0  # whatever the target's is: the heads were trained with it
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_FLAGS = "mla_"  # at the beginning of keys: variants of the attention that some targets' heads have
_REPLACED = frozenset({"eagle_config", "model", "layer_types"})


def decoder_config(
    checkpoint: Checkpoint, prefix: str, num_layers: int, shapes: Mapping[str, object]
) -> dict[str, Any]:
    """The layers' configuration for transformers.

    `prefix` is where config.json has it: "", "model." or "transformer_layer_config."; `shapes` has the stored tensors
    under our names. Raises Refusal; CheckpointError SD-E170, SD-E171.
    """
    stated = layers_config(checkpoint, prefix, USUAL_ROPE_THETA)
    biased = any(checkpoint.get(prefix + name, bool, False) for name in ("attention_bias", "qkv_bias"))
    filled = {
        "model_type": _layer_type(checkpoint, prefix, biased, shapes),
        "num_hidden_layers": num_layers,
        "attention_bias": biased,
    }
    types = checkpoint.get(prefix + "layer_types", list, None)
    if types is not None:
        filled["layer_types"] = types[:num_layers]
    if is_latent(checkpoint, prefix):
        filled |= _latent_config(checkpoint, prefix, num_layers)
    return {name: value for name, value in stated.items() if name not in _REPLACED} | filled


def _layer_type(checkpoint: Checkpoint, prefix: str, biased: bool, shapes: Mapping[str, object]) -> str:
    """The type whose layers these are. Llama's with a bias on queries, keys and values alone are Qwen2's."""
    stated: str = checkpoint.get(prefix + "model_type", str, "llama")
    architectures = checkpoint.get(prefix + "architectures", list, []) if prefix != "transformer_layer_config." else []
    if any("Llama" in str(name) for name in architectures):
        stated = "llama"
    return "qwen2" if stated == "llama" and biased and "layers.0.self_attn.o_proj.bias" not in shapes else stated


def is_latent(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the configuration states latent attention. Raises CheckpointError SD-E171."""
    return checkpoint.get(prefix + "kv_lora_rank", int, None) is not None


def _latent_config(checkpoint: Checkpoint, prefix: str, num_layers: int) -> dict[str, Any]:
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
