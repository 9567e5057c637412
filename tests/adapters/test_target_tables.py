"""The embedding and the head of a checkpoint, read without its layers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from specdec.adapters.target_tables import embedding_and_head

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
CASES = {
    "plain": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "tied": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "a head with a bias": (PhiForCausalLM, PhiConfig(**SMALL)),
    "an embedding that scales": (Gemma3ForCausalLM, Gemma3TextConfig(**SMALL, head_dim=8, num_key_value_heads=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_both_compute_what_the_models_own_do(case, tmp_path):
    cls, config = CASES[case]
    torch.manual_seed(0)
    model = cls(config)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    model.save_pretrained(tmp_path)
    embedding, head = embedding_and_head(tmp_path, torch.float32, torch.device("cpu"))
    ids, states = torch.arange(32), torch.randn(3, 16)
    assert torch.equal(embedding(ids), model.get_input_embeddings()(ids))
    assert torch.equal(head(states), model.get_output_embeddings()(states))


@pytest.mark.parametrize("case", ["plain", "tied"])
def test_layers_are_not_read_for_a_weight_each(case, tmp_path, monkeypatch):
    cls, config = CASES[case]
    cls(config).save_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    embedding_and_head(tmp_path, torch.float32, torch.device("cpu"))
