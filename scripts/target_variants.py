"""Forms in which one type is published: what a small model of each is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_LAYERS = 2
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_FULL = {"layer_types": ["full_attention"] * NUM_LAYERS}
_SLIDING = {"layer_types": ["sliding_attention"] * NUM_LAYERS}

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama, rotary positions of Llama 3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "llama, linear rotary positions": ("llama", {"rope_parameters": _LINEAR_ROPE}),
    "llama, dynamic rotary positions": ("llama", {"rope_parameters": _DYNAMIC}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied weights": ("llama", {"tie_word_embeddings": True}),
    "llama, a key for every query": ("llama", {"num_key_value_heads": 4}),
    "llama, one key for all queries": ("llama", {"num_key_value_heads": 1}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mixtral, no window": ("mixtral", {"sliding_window": None}),
    "mixtral, one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen2, no window": ("qwen2", {"use_sliding_window": False} | _FULL),
    "qwen2, yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen2, tied weights": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe, dense layers between": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": _YARN}),
    "qwen3, tied weights": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe, normed experts": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_next, all attention": ("qwen3_next", LINEAR | _FULL),
    "qwen3_5_text, all linear but the last": (
        "qwen3_5_text",
        LINEAR | {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, all layers slide": ("gemma2", _SLIDING),
    "gemma3_text, all layers slide": ("gemma3_text", _SLIDING),
    "gemma, one key for all queries": ("gemma", {"num_key_value_heads": 1}),
    "phi3, a part is rotated": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi, a part is rotated": ("phi", {"partial_rotary_factor": 0.5}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_bigcode, a key for every query": ("gpt_bigcode", {"multi_query": False}),
    "gpt2, scores scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "starcoder2, no window": ("starcoder2", {"sliding_window": None}),
    "cohere, normed queries": ("cohere", {"use_qk_norm": True}),
    "olmo, clipped": ("olmo", {"clip_qkv": 4.0}),
    "granite, multipliers": (
        "granite",
        {"attention_multiplier": 0.1, "residual_multiplier": 0.3, "logits_scaling": 4.0},
    ),
    "granitemoehybrid, all attention": ("granitemoehybrid", _FULL),
    "deepseek_v2, no compressed queries": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3, no compressed queries": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_parameters": _YARN}),
    "deepseek_v3, dense": ("deepseek_v3", {"first_k_dense_replace": NUM_LAYERS}),
    "stablelm, normed queries, parallel": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "lfm2, all convolutions but the last": (
        "lfm2",
        {"num_hidden_layers": 4, "layer_types": ["conv"] * 3 + ["full_attention"]},
    ),
    "opt, norm behind": ("opt", {"do_layer_norm_before": False}),
    "smollm3, positions in every layer": ("smollm3", {"no_rope_layers": [1] * NUM_LAYERS}),
}
"""What is published under one type in several forms: the type, and settings instead of those."""
