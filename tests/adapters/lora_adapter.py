"""A LoRA adapter of random weights for the tiny target, large enough to change its text."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

RANK = 8
HEAVY = 0.1  # standard deviation of each factor


def write_adapter(directory, target):
    """Over projections of attention. vLLM wraps the embedding and the head as well."""
    config = AutoConfig.from_pretrained(target)
    width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    outputs = {"q_proj": heads * config.head_dim, "v_proj": kv_heads * config.head_dim}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, size in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, width, generator=generator) * HEAVY
            tensors[f"{place}.lora_B.weight"] = torch.randn(size, RANK, generator=generator) * HEAVY
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(outputs)}
    settings |= {"base_model_name_or_path": str(target), "task_type": "CAUSAL_LM", "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory
