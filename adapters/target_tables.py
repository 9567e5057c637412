"""A target's embedding and head, for whoever has its checkpoint and does not run it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.sdk.checkpoint import load_tensors


def embedding_and_head(directory: Path, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The two modules of a checkpoint, and no layer of it where its tensors have their usual names.

    Raises CheckpointError SD-E146 for weights that cannot be read, and what transformers raises.
    """
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)  # or it would ask at the terminal
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    wanted = names[id(embedding)], names[id(head)]
    tensors = load_tensors(directory, wanted, str(device))
    weights = [tensors.get(f"{name}.weight") for name in wanted]
    if weights[1] is None and model.config.get_text_config().tie_word_embeddings:
        weights[1] = weights[0]
    if any(weight is None for weight in weights) or any(True for _ in embedding.buffers()) or head.bias is not None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
        return model.get_input_embeddings(), model.get_output_embeddings()
    for module, weight in zip((embedding, head), weights, strict=True):
        assert weight is not None, "seen to above"
        module.weight = nn.Parameter(weight.to(device, dtype), requires_grad=False)
    return embedding.eval(), head.eval()
