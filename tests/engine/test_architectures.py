"""Many architectures of transformers, each with random weights, decode as transformers does; others are refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from engine_helpers import GREEDY, assert_same_tokens, counter, make_llm, run, tokens
from inside import info_of, proposer_of, target_of
from scripts.small_models import small_config, small_model

from specdec.sdk import ConfigError
from specdec.sdk.errors import UnsupportedModelError

pytestmark = pytest.mark.usefixtures("proven_targets")
VOCAB_SIZE = 128
NUM_TOKENS = 24
WINDOW = 8  # shorter than every text here
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from ties
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
CAPPED = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
SERVED = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},
    "Mixtral": {"num_local_experts": 4},
    "Gemma2": CAPPED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0},
    "Gemma3Text": CAPPED,
    "GPT2": GPT2,
    "Phi3": {"sliding_window": WINDOW},
    "Starcoder2": {"sliding_window": WINDOW},
    "Olmo2": {},
}
SERVED_TOO = {
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Gemma": {"head_dim": 8},
    "Olmo3": {"sliding_window": WINDOW},
    "Granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {"logit_scale": 0.25, "sliding_window": WINDOW},
    "DeepseekV2": {**LATENT, "first_k_dense_replace": 1},
    "DeepseekV3": {**LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "GPTNeoX": {"rotary_pct": 0.5},
    "SmolLM3": {},
    "Glm4": {"head_dim": 8},
    "Exaone4": {"sliding_window": WINDOW},
    "Phi": {},
    "Ernie4_5": {"head_dim": 8},
    "SeedOss": {"head_dim": 8},
    "Apertus": {},
    "HunYuanDenseV1": {"head_dim": 8},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Persimmon": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 16, "use_sliding_window": False},
    "Lfm2": {"full_attn_idxs": [0, 1]},  # all attention
}


def configure(name, **changes):
    return getattr(transformers, f"{name}Config")(**SMALL | changes)


@pytest.fixture
def save(tmp_path):
    """Makes a checkpoint of a configuration with random weights and returns (folder, the model run eagerly)."""

    def save(config):
        model = small_model(config)
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return save


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (11, 30, 41)]


def reference(model, texts):
    with torch.inference_mode():
        return [
            model.generate(torch.tensor([text]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)[
                0, len(text) :
            ].tolist()
            for text in texts
        ]


def assert_equals_transformers(folder, model, texts, **settings):
    """Greedy equality with drafts that are right, wrong and ragged, prompts in chunks, blocks of 4 tokens."""
    expected = reference(model, texts)
    assert len({token for output in expected for token in output}) > 2, "the model says more than one thing"
    known = [[*text, *output] for text, output in zip(texts, expected, strict=True)]
    script = {"sequences": known, "wrong_every": 3, "ragged": True, "vocab_size": VOCAB_SIZE}
    llm = make_llm("Scripted", options=script, model=folder, max_model_len=128, block_size=4, **settings)
    params = GREEDY.replace(max_tokens=NUM_TOKENS)
    outputs = tokens(llm.generate([{"prompt_token_ids": text} for text in texts], params))
    assert_same_tokens(outputs, expected, texts, model)
    assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    assert counter(llm, "spec_decode_num_draft_tokens") > counter(llm, "spec_decode_num_accepted_tokens")
    return llm


@pytest.mark.parametrize("chunk", [2048, 16], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", [*SERVED, *(pytest.param(name, marks=pytest.mark.full) for name in SERVED_TOO)])
def test_greedy_equals_transformers(name, chunk, save, texts):
    folder, model = save(configure(name, **(SERVED | SERVED_TOO)[name]))
    assert_equals_transformers(folder, model, texts, max_num_batched_tokens=chunk)


@pytest.mark.parametrize("name", ["Gemma2", pytest.param("DeepseekV3", marks=pytest.mark.full)])
def test_preempted_requests_equal_transformers(name, save, texts):
    folder, model = save(configure(name, **(SERVED | SERVED_TOO)[name]))
    llm = assert_equals_transformers(folder, model, texts, num_kv_blocks=22)
    assert counter(llm, "num_preemptions") > 0


@pytest.mark.parametrize("name", ["Gemma2", "GPT2", *(pytest.param(name, marks=pytest.mark.full) for name in SERVED)])
def test_hidden_states_are_those_of_transformers(name, save, texts):
    folder, model = save(configure(name, **SERVED[name]))
    llm = make_llm("Recorder", options={"hidden_states": (0, 1, "final")}, model=folder, max_model_len=128)
    llm.engine.add_request(texts[1], GREEDY.replace(max_tokens=4))
    run(llm.engine)
    (shown,) = proposer_of(llm).steps[0]
    with torch.inference_mode():
        states = model(torch.tensor([texts[1]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[0], states[1], states[-1]], dim=-1)[0]
    torch.testing.assert_close(shown.hidden, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "grouped_mm", "batched_mm"])
def test_every_experts_backend_gives_the_same_tokens(backend, save, texts):
    folder, model = save(configure("Qwen3Moe", **SERVED["Qwen3Moe"]))
    llm = assert_equals_transformers(folder, model, texts[:2], moe_backend=backend)
    assert target_of(llm).config._experts_implementation == backend


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_an_automatic_experts_backend_is_left_to_transformers(name, save):
    folder, model = save(configure(name, **SERVED[name]))
    loaded = target_of(make_llm(model=folder, max_model_len=64, moe_backend="auto")).config
    assert loaded._experts_implementation == model.config._experts_implementation


def test_an_experts_backend_for_a_model_without_experts_is_refused(save):
    folder, _ = save(configure("Llama"))
    with pytest.raises(ConfigError, match="experts"):
        make_llm(model=folder, max_model_len=64, moe_backend="grouped_mm")


def test_an_unknown_experts_backend_is_refused_by_name(save):
    folder, _ = save(configure("Qwen3Moe", **SERVED["Qwen3Moe"]))
    with pytest.raises(ConfigError, match="fastest"):
        make_llm(model=folder, max_model_len=64, moe_backend="fastest")


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 72,
}


@pytest.mark.parametrize("rope", [YARN, pytest.param(DYNAMIC, marks=pytest.mark.full)], ids=["yarn", "dynamic"])
def test_scaled_rotary_positions_equal_transformers(rope, save, texts):
    folder, model = save(configure("Llama", rope_parameters=rope))
    assert_equals_transformers(folder, model, texts)


def test_rotary_tables_that_depend_on_the_longest_text_end_the_model_length(save, texts):
    config = configure("Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=72)
    folder, model = save(config)
    with pytest.raises(ConfigError, match="max_model_len"):
        make_llm(model=folder, max_model_len=128)
    llm = make_llm(model=folder, max_model_len=None)
    assert info_of(llm).max_model_len == 72
    outputs = tokens(llm.generate([{"prompt_token_ids": text} for text in texts], GREEDY.replace(max_tokens=24)))
    assert_same_tokens(outputs, reference(model, texts), texts, model)


def test_rotary_tables_of_one_layer_type_end_the_model_length_too(save):
    of_types = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    folder, _ = save(configure("Gemma3Text", **CAPPED, rope_parameters=of_types))
    with pytest.raises(ConfigError, match="max_model_len"):
        make_llm(model=folder, max_model_len=128)
    assert info_of(make_llm(model=folder, max_model_len=None)).max_model_len == 72


def test_learned_positions_end_the_model_length(save):
    folder, _ = save(configure("GPT2", **GPT2))
    with pytest.raises(ConfigError, match="256"):
        make_llm(model=folder, max_model_len=257)
    assert info_of(make_llm(model=folder, max_model_len=None)).max_model_len == 256


REFUSED_BY_CONFIGURATION = {
    "state_of_its_own": (lambda: transformers.RwkvConfig(num_hidden_layers=2), "'rescale_every'"),
    "state_and_attention": (lambda: transformers.RecurrentGemmaConfig(num_hidden_layers=3), "'lru_width'"),
    "encoder_decoder": (lambda: transformers.T5Config(), "'is_encoder_decoder'"),
}


@pytest.mark.parametrize("name", REFUSED_BY_CONFIGURATION)
def test_what_cannot_be_served_is_refused_by_its_configuration(name, tmp_path):
    make_config, reason = REFUSED_BY_CONFIGURATION[name]
    make_config().save_pretrained(tmp_path)  # there are no weights: nothing is loaded before the refusal
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        make_llm(model=tmp_path)
    assert caught.value.code == "SD-E142"
    assert "model_type" in caught.value.facts


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "codegen", "openai-gpt", "xlnet"])
def test_classes_that_cannot_be_served_are_refused_before_weights_are_loaded(model_type, tmp_path):
    small_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"SD-E144 (.|\n)*(position_ids|its attention is its own)"):
        make_llm(model=tmp_path, max_model_len=64)


REFUSED_BY_ATTENTION = {
    "bidirectional": (lambda: configure("Bert"), "SD-E141", "later tokens"),
    "twice_in_a_layer": (lambda: configure("DiffLlama"), "SD-E141", "more than once"),
    "alibi": (lambda: transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4), "SD-E144", "position_ids"),
    "no_interface": (lambda: transformers.OpenAIGPTConfig(**GPT2), "SD-E144", "its attention is its own"),
    "classes_of_its_own": (lambda: transformers.GPTJConfig(**GPT2, rotary_dim=4), "SD-E144", "its own"),
}


@pytest.mark.parametrize("name", REFUSED_BY_ATTENTION)
def test_attention_that_is_not_served_is_refused(name, save):
    make_config, code, reason = REFUSED_BY_ATTENTION[name]
    folder, _ = save(make_config())
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        make_llm(model=folder, max_model_len=64)
    assert caught.value.code == code
