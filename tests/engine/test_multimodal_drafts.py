"""Checkpoints of several modalities with drafts: their embedding and head are found, and greedy text stays plain's."""

from __future__ import annotations

import json

import pytest
import torch
from engine_helpers import GREEDY, counter, make_llm, tokens
from inside import proposer_of
from safetensors.torch import save_file
from scripts.small_models import small_config, small_model

from specdec.core.model.model_class import text_config

HEADS, HEAD_DIM, FFN = 2, 16, 48
PROMPTS = [[5, 9, 5, 9, 5], list(range(20, 40))]


@pytest.fixture(scope="module", params=["qwen2_vl", "gemma3"])
def target(request, tmp_path_factory):
    """A checkpoint, the configuration of its language model, and its model."""
    folder = tmp_path_factory.mktemp(request.param)
    config = small_config(request.param)
    model = small_model(config)
    model.save_pretrained(folder)
    return folder, text_config(config), model


@pytest.fixture
def eagle3(target, tmp_path):
    """A head with random weights, without an embedding or output of its own: the target's are used."""
    config, width = target[1], target[1].hidden_size
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (width, 2 * width),
        "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * width),
        "layers.0.self_attn.k_proj.weight": (HEADS * HEAD_DIM, 2 * width),
        "layers.0.self_attn.v_proj.weight": (HEADS * HEAD_DIM, 2 * width),
        "layers.0.self_attn.o_proj.weight": (width, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (FFN, width),
        "layers.0.mlp.up_proj.weight": (FFN, width),
        "layers.0.mlp.down_proj.weight": (width, FFN),
    }
    tensors = {name: torch.randn(*shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = "norm", "layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm"
    save_file(tensors | {f"{name}.weight": torch.ones(width) for name in norms}, tmp_path / "model.safetensors")
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "hidden_size": width,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 128,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def with_head(eagle3, **settings):
    return make_llm(
        "eagle3", speculative={"model": str(eagle3)}, options={"aux_layer_convention": "layer_output"}, **settings
    )


def served(llm):
    return tokens(llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY.replace(max_tokens=24)))


@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_drafts_change_no_text(name, target, eagle3):
    settings = {"model": target[0], "max_model_len": 128}
    llm = make_llm(name, **settings) if name == "ngram" else with_head(eagle3, **settings)
    assert served(llm) == served(make_llm(**settings))
    assert counter(llm, "spec_decode_num_draft_tokens") > 0


@torch.inference_mode()
def test_a_head_is_given_the_embedding_and_the_output_of_the_language_model(target, eagle3):
    services = proposer_of(with_head(eagle3, model=target[0], max_model_len=128)).services
    ids, model = torch.arange(7), target[2]
    expected = model.get_input_embeddings()(ids)
    torch.testing.assert_close(services.embed(ids), expected)
    torch.testing.assert_close(
        services.lm_head(expected), model.get_output_embeddings()(expected), rtol=1e-4, atol=1e-5
    )


@torch.inference_mode()
def test_a_head_without_a_table_reads_the_rows_that_it_was_trained_on(target, eagle3):
    """Gemma multiplies them by the root of their width."""
    network, ids = proposer_of(with_head(eagle3, model=target[0], max_model_len=128)).network, torch.arange(7)
    torch.testing.assert_close(network.embedding(ids), target[2].get_input_embeddings().weight[ids])


def test_a_draft_model_may_read_images_too(target):
    folder = str(target[0])
    llm = make_llm("draft_model", speculative={"model": folder}, model=folder, max_model_len=128)
    served(llm)
    drafted, accepted = (counter(llm, f"spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
    assert accepted == drafted > 0, "it is the target itself"
