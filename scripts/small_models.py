"""Small models, with random weights, of the types that transformers registers for causal language models."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 128
WINDOW = 8
NUM_LAYERS = 2
MOST_PARAMETERS = 20_000_000

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
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

_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_BOTH = {"layer_types": ["linear_attention", "full_attention"]}

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_d_head": "auto",
    },
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1], "mamba_d_state": 16},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_ssm": 64},
    "jamba": {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2},
    "qwen3_next": _LINEAR | _BOTH,
    "qwen3_5_text": _LINEAR | _BOTH,
    "qwen3_5_moe_text": _LINEAR | _BOTH,
    "olmo_hybrid": _LINEAR | _BOTH,
    "qwen4_exp_text": _LINEAR | _BOTH,
    "kimi_linear": _BOTH,
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
    """All types of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(model_type: str) -> Any:
    """Raises NotBuildableError."""
    config_class = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(config_class.__init__).parameters)
    aliases = {common for common, own in config_class.attribute_map.items() if own in SIZES}
    values = {name: value for name, value in SIZES.items() if name in known - aliases}
    values |= {
        common: SIZES[common] for common in config_class.attribute_map if common in SIZES and common not in aliases
    }
    if "kv_lora_rank" in known:  # every head has a key of its own
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= SPECIAL.get(model_type, {})
    try:
        return config_class(**values)
    except Exception as error:
        raise NotBuildableError(f"configuration: {type(error).__name__}: {error}") from error


def small_model(config: Any) -> Any:
    """Random float32 weights, biases and norms too, run by transformers' eager attention. Raises NotBuildableError."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(action="ignore"):  # of modelling code, when it is imported
            _check_size(config)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except Exception as error:
        raise NotBuildableError(f"model: {type(error).__name__}: {error}") from error
    for parameter in model.parameters():  # biases and norms that are all zero or one would hide mistakes
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return model


def _check_size(config: Any) -> None:
    """Sizes that `SIZES` does not know may leave a type as large as it is published."""
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).parameters()
    size = sum(parameter.numel() for parameter in parameters)
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
