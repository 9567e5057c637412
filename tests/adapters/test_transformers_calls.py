"""What a call of `generate` brings of its own: criteria, constraints, lengths."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from test_transformers import SHIPPED, greedy
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OpenAIGPTModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    StoppingCriteriaList,
)

from specdec.adapters.transformers import speculative
from specdec.adapters.transformers.refusals import padding_of
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


def test_scores_of_a_processor_may_be_a_single_row_and_no_more(model, prompts, text, drafting):
    def greedy_of(shape):
        processors = LogitsProcessorList([lambda _, scores: shape(scores)])
        return greedy(model, prompts[0], custom_generate=drafting, logits_processor=processors)

    assert greedy_of(lambda scores: scores[0])[0, prompts[0].shape[1] :].tolist() == text
    with pytest.raises(RuntimeError):
        greedy_of(lambda scores: scores.expand(2, -1))


@pytest.mark.parametrize("length", [10**12, 10**30])
def test_a_length_beyond_the_models_is_refused_before_memory_is_taken_for_it(model, prompts, drafting, length):
    with pytest.raises(RequestError, match=r"SD-E197(?s:.)*max_length allows"):
        greedy(model, prompts[0], custom_generate=drafting, max_new_tokens=length)


@pytest.mark.parametrize(
    "model", ["tiny", None, OpenAIGPTModel(OpenAIGPTConfig(vocab_size=8, n_embd=8, n_layer=1, n_head=1))]
)
def test_what_has_no_generate_is_refused(model):
    with pytest.raises(UnsupportedModelError, match=rf"SD-E142(?s:.)*{type(model).__name__}(?s:.)*own `generate`"):
        speculative(model, SHIPPED["ngram"])


def test_a_model_without_a_cache_is_refused():
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=8, n_positions=32, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UnsupportedModelError, match=r"SD-E142(?s:.)*past_key_values"):
        speculative(model, SHIPPED["ngram"])


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
@pytest.mark.parametrize("after", [0, 3])
def test_a_sample_of_no_distribution_is_refused_and_a_greedy_text_is_that_of_plain_generate(
    model, prompts, drafting, value, after
):
    length = prompts[0].shape[1] + after
    processors = LogitsProcessorList([lambda ids, scores: scores if ids.shape[1] < length else scores * 0 + value])
    with pytest.raises(RequestError, match=r"SD-E197(?s:.)*a token sampled from scores"):
        greedy(model, prompts[0], custom_generate=drafting, logits_processor=processors, do_sample=True)
    settings = {"logits_processor": processors, "max_new_tokens": 6}
    found = greedy(model, prompts[0], custom_generate=drafting, **settings)
    assert torch.equal(found, greedy(model, prompts[0], **settings))


def test_scores_behind_an_end_token_may_be_no_distribution(model, prompts, text, drafting):
    start, end = prompts[0].shape[1], text[3]

    def process(ids, scores):
        only = torch.full_like(scores, -torch.inf)
        only[:, text[ids.shape[1] - start]] = 0.0
        return only * torch.nan if end in ids[0, start:] else only

    settings = {"logits_processor": LogitsProcessorList([process]), "eos_token_id": end, "do_sample": True}
    found = greedy(model, prompts[0], custom_generate=drafting, **settings)
    assert found[0, start:].tolist() == text[: text.index(end) + 1]


@pytest.mark.parametrize("shown", [[1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [2, 2, 2, 2]])
def test_a_mask_that_is_no_padding_on_the_left_is_refused_with_its_row(model, shown):
    decoding = speculative(model, SHIPPED["ngram"], max_num_seqs=2)
    mask = torch.tensor([[0, 1, 1, 1], shown])
    with pytest.raises(RequestError, match=r"attention_mask with holes or without a 1 \(row 1\)"):
        greedy(model, torch.full((2, 4), 5), custom_generate=decoding, attention_mask=mask)


def test_padding_takes_nothing_of_the_longest_length(model):
    decoding = speculative(model, SHIPPED["ngram"], max_model_len=20)
    ids, mask = torch.full((1, 20), 5), torch.tensor([[0] * 10 + [1] * 10])
    asked = {"attention_mask": mask, "max_new_tokens": 10}
    assert torch.equal(greedy(model, ids, custom_generate=decoding, **asked), greedy(model, ids, **asked))
    with pytest.raises(RequestError, match="10 tokens in the prompt, and max_length allows 21"):
        greedy(model, ids, custom_generate=decoding, **asked | {"max_new_tokens": 11})


@pytest.mark.parametrize("plane", [0, 1, 2])
def test_positions_of_images_are_refused_in_whatever_plane_they_are(plane):
    ids, positions = torch.full((1, 4), 5), torch.arange(4).expand(3, 1, 4).clone()
    assert padding_of(ids, {"position_ids": positions}) == [0]
    positions[plane, 0, 3] = 9
    with pytest.raises(RequestError, match="position_ids of its own"):
        padding_of(ids, {"position_ids": positions})


class SeesScores:
    """A criterion that ends nothing and keeps the likeliest token of each output position that it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(None if scores is None else [int(each.argmax()) for each in scores])
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("kept", [False, True])
def test_a_criterion_is_shown_the_scores_that_are_kept(model, prompts, drafting, kept):
    settings = {"return_dict_in_generate": True, "output_scores": kept, "max_new_tokens": 9}
    plain, ours = SeesScores(), SeesScores()
    greedy(model, prompts[0], stopping_criteria=StoppingCriteriaList([plain]), **settings)
    greedy(model, prompts[0], custom_generate=drafting, stopping_criteria=StoppingCriteriaList([ours]), **settings)
    assert ours.seen == plain.seen
    assert len(ours.seen) == 9


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda ids: ids.float(), r"input_ids \[1, \d+\] of torch.float32"),
        (lambda ids: ids[:, :0], r"input_ids \[1, 0\]"),
        (lambda ids: ids[:0], r"input_ids \[0, \d+\]"),
    ],
    ids=["not integers", "empty prompt", "empty batch"],
)
def test_ids_that_are_no_prompt_are_refused_by_name(model, prompts, drafting, change, told):
    with pytest.raises(RequestError, match=told):
        greedy(model, change(prompts[0]), custom_generate=drafting)


def test_a_cache_of_other_rows_than_the_batch_is_refused(model, prompts):
    decoding = speculative(model, SHIPPED["ngram"], max_num_seqs=2)
    ids, cache = prompts[0], DynamicCache()
    greedy(model, ids[:, :-1], past_key_values=cache, max_new_tokens=1)
    for several in ({"inputs": ids.expand(2, -1)}, {"inputs": ids, "num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(RequestError, match="past_key_values of 1 rows, and a batch of 2"):
            model.generate(**several, past_key_values=cache, custom_generate=decoding, max_new_tokens=4)
    cache.batch_repeat_interleave(2)
    settings = {"past_key_values": cache, "custom_generate": decoding, "max_new_tokens": 4}
    assert torch.equal(greedy(model, ids.expand(2, -1), **settings)[:1], greedy(model, ids, max_new_tokens=4))


def test_no_cache_is_returned_where_none_is_used(model, prompts, drafting):
    settings = {"use_cache": False, "return_dict_in_generate": True, "max_new_tokens": 6}
    plain = greedy(model, prompts[0], **settings)
    found = greedy(model, prompts[0], custom_generate=drafting, **settings)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.past_key_values is plain.past_key_values is None


def test_a_call_that_has_ended_or_failed_keeps_no_cache(model, prompts, drafting):
    def fail(ids, scores):
        raise KeyError("of a processor")

    kept = []
    for processors in ([], [fail]):
        cache = DynamicCache()
        settings = {"past_key_values": cache, "logits_processor": LogitsProcessorList(processors)}
        with nullcontext() if not processors else pytest.raises(KeyError):
            greedy(model, prompts[0], custom_generate=drafting, **settings)
        kept += [weakref.ref(cache), *(weakref.ref(layer.keys) for layer in cache.layers)]
    del cache, settings
    gc.collect()
    assert len(kept) > 2
    assert not any(each() is not None for each in kept)


def test_a_model_of_images_and_text_goes_on_with_text_alone():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.5, "rope_parameters": rope}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    config = Qwen2VLConfig(text_config=sizes | heads | ends, vision_config=vision, image_token_id=60, video_token_id=61)
    model = Qwen2VLForConditionalGeneration(config).eval()
    ids, mask = torch.randint(2, 50, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 40, "pad_token_id": 0}
    decoding = speculative(model, SHIPPED["ngram"], max_model_len=64, max_num_seqs=2)
    assert torch.equal(greedy(model, ids, custom_generate=decoding, **settings), greedy(model, ids, **settings))
    assert decoding.metrics.acceptance.num_accepted_tokens > 0
    with pytest.raises(RequestError, match="model inputs mm_token_type_ids"):
        greedy(model, ids, custom_generate=decoding, mm_token_type_ids=mask, **settings)
