"""Small models, with random weights, of the types that transformers registers for language models, and for several
modalities with text."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from specdec.core.model.model_class import auto_class

from .target_variants import LINEAR, NUM_LAYERS, VARIANTS

VOCAB_SIZE = 128
WINDOW = 8
MOST_PARAMETERS = 40_000_000

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "shared_expert_intermediate_size": 16,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "d_inner": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_layers": NUM_LAYERS,
    "encoder_layers": NUM_LAYERS,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_hidden_layers": NUM_LAYERS,
    "n_layer": NUM_LAYERS,
    "n_layers": NUM_LAYERS,
    "num_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "kv_channels": 8,
    "rotary_dim": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "query_pre_attn_scalar": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "is_decoder": True,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "pad_token_id": 0,
    "rope_scaling": None,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": None,
}
"""What the settings of any configuration are set to that has them."""

OTHER_MODALITY: Mapping[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "output_dim": 32,
    "output_hidden_size": 32,
    "projection_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 64,
    "encoder_ffn_dim": 64,
    "mlp_dim": 64,
    "depth": 2,
    "num_hidden_layers": NUM_LAYERS,
    "encoder_layers": NUM_LAYERS,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0, 1],
    "num_heads": 4,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "global_attn_indexes": [1],
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "max_position_embeddings": 256,
    "max_source_positions": 64,
}
"""The same for encoders of images and sound."""

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

_BOTH = {"layer_types": ["linear_attention", "full_attention"]}

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    **{
        name: {"rope_parameters": _MROPE}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text")
    },
    **{
        name: {"rope_parameters": _MROPE | {"mrope_section": sections}}
        for name, sections in (
            ("glm4v_moe_text", [1, 1, 0]),
            ("glm_ocr_text", [1, 1, 2]),
            ("paddleocr_vl_text", [1, 1, 2]),
            ("qwen2_5_omni_text", [1, 1, 2]),
        )
    },
    "llama4_text": {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 64, "num_hidden_layers": 4},
    "gemma3n_text": {"num_hidden_layers": 3},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "xmod": {"default_language": "en_XX"},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4},
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_d_head": "auto",
    },
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1], "mamba_d_state": 16},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_ssm": 64},
    "jamba": {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "qwen3_next": LINEAR | _BOTH,
    "qwen3_5_text": LINEAR | _BOTH,
    "qwen3_5_moe_text": LINEAR | _BOTH,
    "olmo_hybrid": LINEAR | _BOTH,
    "qwen4_exp_text": LINEAR | _BOTH,
    "kimi_linear": _BOTH,
    "bailing_hybrid": _BOTH,
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_ngroups": 1, "n_mamba_heads": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8},
}
"""Of a type, instead of those."""


class NotBuildableError(Exception):
    """No small model of this type could be made."""


def model_types() -> list[str]:
    """All causal language models of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def multimodal_types() -> list[str]:
    """All other types that read other modalities and text, and write text."""
    return sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())


def small_config(name: str) -> Any:
    """Of a type or a variant. Raises NotBuildableError."""
    model_type, own = VARIANTS.get(name, (name, {}))
    try:
        return _small_config(CONFIG_MAPPING[model_type], model_type, SIZES, own)
    except Exception as error:
        raise NotBuildableError(f"configuration: {type(error).__name__}: {error}") from error


def _small_config(
    config_class: Any, model_type: str, sizes: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> Any:
    values = _values(config_class, sizes) | _parts(config_class) | SPECIAL.get(model_type, {}) | (own or {})
    return config_class(**values)


def _parts(config_class: Any) -> dict[str, Any]:
    """Small configurations of what a model of several modalities consists of."""
    parts: dict[str, Any] = {}
    for name, part_class in config_class.sub_configs.items():
        own = getattr(config_class(), name) if part_class is AutoConfig else part_class
        if own is not None:
            part_class = type(own) if part_class is AutoConfig else part_class
            sizes = SIZES if name in ("text_config", "decoder") else OTHER_MODALITY
            parts[name] = _small_config(part_class, part_class.model_type, sizes)
    return parts


def _values(config_class: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(config_class.__init__).parameters)
    aliases = {common for common, own in config_class.attribute_map.items() if own in sizes}
    values = {name: value for name, value in sizes.items() if name in known - aliases}
    values |= {
        common: sizes[common] for common in config_class.attribute_map if common in sizes and common not in aliases
    }
    if "kv_lora_rank" in known:  # every head has a key of its own
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values


def small_model(config: Any) -> Any:
    """Random float32 weights, biases and norms too, run by transformers' eager attention. Raises NotBuildableError."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(action="ignore"):  # of modelling code, when it is imported
            _check_size(config)
            model = auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except Exception as error:
        raise NotBuildableError(f"model: {type(error).__name__}: {error}") from error
    for parameter in model.parameters():  # biases and norms that are all zero or one would hide mistakes
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return model


def _check_size(config: Any) -> None:
    """Sizes that `SIZES` does not know may leave a type as large as it is published."""
    with torch.device("meta"):
        parameters = auto_class(config).from_config(config).parameters()
    size = sum(parameter.numel() for parameter in parameters)
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
