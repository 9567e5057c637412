"""What a call of `generate` brings of its own: criteria, constraints, lengths."""

from __future__ import annotations

import pytest
import torch
from test_transformers import SHIPPED, greedy
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    StoppingCriteriaList,
)

from specdec.adapters.transformers import speculative
from specdec.sdk.errors import RequestError, UnsupportedModelError


@pytest.fixture(scope="module")
def drafting(model):
    return speculative(model, SHIPPED["eagle3"])


@pytest.fixture(scope="module")
def text(model, prompts):
    """What plain `generate` says to the first prompt."""
    return greedy(model, prompts[0])[0, prompts[0].shape[1] :].tolist()


@pytest.mark.parametrize("length", [3, 12])
def test_a_length_of_the_callers_own_criterion_replaces_that_of_the_call(model, prompts, drafting, length):
    criteria = StoppingCriteriaList([MaxLengthCriteria(prompts[0].shape[1] + length)])
    found = greedy(model, prompts[0], custom_generate=drafting, stopping_criteria=criteria, max_new_tokens=5)
    assert torch.equal(found, greedy(model, prompts[0], max_new_tokens=length))


def test_end_tokens_of_the_callers_own_criterion_replace_those_of_the_call(model, prompts, text, drafting):
    settings = {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(text[6])]), "eos_token_id": text[3]}
    found = greedy(model, prompts[0], custom_generate=drafting, **settings)
    assert torch.equal(found, greedy(model, prompts[0], **settings))
    assert found.shape[1] > prompts[0].shape[1] + text.index(text[3]) + 1


def test_a_constraint_is_not_asked_what_follows_a_draft_that_it_ruled_out(model, prompts, text, drafting):
    start = prompts[0].shape[1]
    texts = [[*text[:3], *range(1000, 1005)], [*text[:2], *range(50, 56)]]
    following = {tuple(each[:n]): [] for each in texts for n in range(8)}
    for each in texts:
        for n in range(8):
            following[tuple(each[:n])].append(each[n])
    settings = {"prefix_allowed_tokens_fn": lambda _, ids: following[tuple(ids[start:].tolist())], "max_new_tokens": 8}
    assert torch.equal(
        greedy(model, prompts[0], custom_generate=drafting, **settings), greedy(model, prompts[0], **settings)
    )


@pytest.mark.parametrize("length", [10**12, 10**30])
def test_a_length_beyond_the_models_is_refused_before_memory_is_taken_for_it(model, prompts, drafting, length):
    with pytest.raises(RequestError, match=r"SD-E197(?s:.)*max_length allows"):
        greedy(model, prompts[0], custom_generate=drafting, max_new_tokens=length)


def test_a_model_without_a_cache_is_refused():
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=8, n_positions=32, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UnsupportedModelError, match=r"SD-E142(?s:.)*past_key_values"):
        speculative(model, SHIPPED["ngram"])
