"""What the configurations of checkpoints in the `speculators` format have in common."""

from __future__ import annotations

from typing import Any

from .layers import Dims


def proposal(algorithm: str, num_drafts: int) -> dict[str, Any]:
    """Greedy drafts for the tiny target, which lies beside the checkpoint."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": num_drafts,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": "../target", "architectures": ["Qwen3ForCausalLM"]},
    }


def layer_config(model_type: str, dims: Dims, num_layers: int, vocab_size: int, **others: Any) -> dict[str, Any]:
    """The drafter's layers, as a transformers configuration. others: what is of this model type alone."""
    return {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn,
        "num_hidden_layers": num_layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": dims.eps,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        **others,
        "rope_parameters": {"rope_type": "default", "rope_theta": dims.rope_theta},
    }
