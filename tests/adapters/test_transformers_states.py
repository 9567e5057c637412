"""Proposers inside `model.generate` of models whose layers keep a state: recurrences, convolutions."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from scripts.small_models import small_config, small_model
from transformers import AutoModelForCausalLM, DynamicCache

from specdec.adapters.transformers import speculative
from specdec.sdk.errors import RequestError, UnsupportedModelError
from specdec.sdk.packaged import packaged

ENGINE = f"transformers {transformers.__version__}, CPU"
PROPOSERS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "mtp": {"method": "mtp", "num_speculative_tokens": 4},
}
GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
QUICK = {"nemotron_h", "jamba", "mamba2"}  # two forms of one recurrence; one that goes on by token; no attention at all
TYPES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "lfm2_moe",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "kimi_linear",
    "olmo_hybrid",
    "jamba",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "zamba",
    "zamba2",
)


@pytest.fixture(scope="module")
def hybrid():
    model = AutoModelForCausalLM.from_pretrained(packaged("tiny/hybrid"), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def record(shown):
    """Note what `generate` showed."""

    def note(decoding):
        calls = [(os.getpid(), decoding.metrics.counts["proposer_propose_calls"])]
        shown(ENGINE, "targets whose layers keep a state", workers=calls)

    return note


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_text_and_the_cache_that_is_left_are_those_of_plain_generate(hybrid, prompts, name, record):
    decoding = speculative(hybrid, PROPOSERS[name], max_model_len=512)
    for ids in prompts:
        plain = hybrid.generate(ids, **GREEDY | {"max_new_tokens": 32})
        drafted = hybrid.generate(ids, custom_generate=decoding, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(drafted.sequences, plain[:, :-8])
        going_on = {"past_key_values": drafted.past_key_values, **GREEDY, "max_new_tokens": 8}
        assert torch.equal(hybrid.generate(drafted.sequences, **going_on), plain)
    assert decoding.metrics.acceptance.num_accepted_tokens > 0
    record(decoding)


def test_a_padded_text_and_the_cache_that_is_left_are_those_of_plain_generate(hybrid, prompts):
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prompts[0]], dim=1)
    mask = (torch.arange(ids.shape[1] + 64) >= 3).long()[None]
    plain = hybrid.generate(ids, attention_mask=mask[:, : ids.shape[1]], **GREEDY | {"max_new_tokens": 32})
    decoding = speculative(hybrid, PROPOSERS["ngram"], max_model_len=512)
    told = {"attention_mask": mask[:, : ids.shape[1]], "custom_generate": decoding, "return_dict_in_generate": True}
    drafted = hybrid.generate(ids, **told, **GREEDY)
    assert torch.equal(drafted.sequences, plain[:, :-8])
    going_on = {"past_key_values": drafted.past_key_values, "attention_mask": mask[:, : drafted.sequences.shape[1]]}
    assert torch.equal(hybrid.generate(drafted.sequences, **going_on, **GREEDY | {"max_new_tokens": 8}), plain)


def test_a_seed_gives_the_same_sample_with_and_without_drafts(hybrid, prompts):
    texts = []
    for proposer in ("ngram", "adapter_proposers:Silent"):
        decoding = speculative(hybrid, {"method": proposer, "num_speculative_tokens": 4}, max_model_len=512)
        torch.manual_seed(3)
        sampled = {"do_sample": True, "temperature": 0.6, "max_new_tokens": 24, "custom_generate": decoding}
        texts.append(hybrid.generate(prompts[0], **sampled))
    assert decoding.metrics.acceptance.num_accepted_tokens == 0
    assert torch.equal(*texts)


def test_the_modules_compute_as_before_after_a_call_that_failed(hybrid, prompts):
    config = {"method": "adapter_proposers:Failing", "num_speculative_tokens": 2, "on_proposer_error": "raise"}
    decoding = speculative(hybrid, config, max_model_len=512)
    with pytest.raises(Exception, match="no idea"):
        hybrid.generate(prompts[0], custom_generate=decoding, **GREEDY)
    assert not any("forward" in vars(module) for module in hybrid.modules())


def test_a_cache_that_holds_states_is_computed_again_and_goes_on(hybrid, prompts):
    cache = DynamicCache(config=hybrid.config)
    with torch.no_grad():
        hybrid(prompts[0][:, :-1], past_key_values=cache)
    decoding = speculative(hybrid, PROPOSERS["ngram"], max_model_len=512)
    plain = hybrid.generate(prompts[0], **GREEDY | {"max_new_tokens": 32})
    drafted = hybrid.generate(prompts[0], past_key_values=cache, custom_generate=decoding, **GREEDY)
    assert torch.equal(drafted, plain[:, :-8])
    going_on = {"past_key_values": cache, **GREEDY, "max_new_tokens": 8}
    assert torch.equal(hybrid.generate(drafted, **going_on), plain)


def test_a_batch_of_states_is_refused(hybrid, prompts):
    decoding = speculative(hybrid, PROPOSERS["ngram"], max_model_len=512, max_num_seqs=2)
    with pytest.raises(RequestError, match="keep a state of each row"):
        hybrid.generate(prompts[0].expand(2, -1), custom_generate=decoding, **GREEDY)


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in TYPES]
)
def test_half_garbage_changes_no_text_of_any_type(model_type):
    model = small_model(small_config(model_type))
    model.generation_config.eos_token_id = None
    prompt = torch.randint(1, 128, (1, 19), generator=torch.Generator().manual_seed(1))
    plain = model.generate(prompt, **GREEDY)
    proposer = "scripts.half_garbage.HalfGarbage"
    config = {"model": proposer, "num_speculative_tokens": 4, "texts": [plain[0].tolist()]}
    decoding = speculative(model, config, max_model_len=128)
    assert torch.equal(model.generate(prompt, custom_generate=decoding, **GREEDY), plain)
    assert decoding.metrics.acceptance.num_accepted_tokens > 8


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("minimax", r"SD-E144 (.|\n)*get_linear_cache"),
        ("zaya", r"SD-E260 (.|\n)*one row for each token"),
        ("rwkv", r"SD-E142 (.|\n)*rescale_every"),
        ("recurrent_gemma", r"SD-E142 (.|\n)*lru_width"),
    ],
)
def test_states_that_are_kept_another_way_are_refused_by_name(model_type, told):
    with pytest.raises(UnsupportedModelError, match=told):
        speculative(small_model(small_config(model_type)), PROPOSERS["ngram"], max_model_len=128)
