"""Batches and filled caches in `model.generate`: rows of different lengths, and texts whose beginning was computed."""

from __future__ import annotations

import os
from copy import deepcopy

import pytest
import torch
import transformers
from adapter_proposers import NotesStarts
from scripts.small_models import small_config, small_model
from test_transformers import SHIPPED, chi_square, small_model_of_five, tail_bound
from transformers import DynamicCache, StaticCache, StoppingCriteria, StoppingCriteriaList

from specdec.adapters.transformers import speculative
from specdec.sdk.errors import RequestError

ENGINE = f"transformers {transformers.__version__}, CPU"
NUM_ROWS, NUM_NEW_TOKENS = 3, 20
GREEDY = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
five_tokens = pytest.fixture(scope="module")(small_model_of_five)


@pytest.fixture
def record(shown):
    """Note what `generate` showed."""

    def note(decoding, *capabilities):
        shown(ENGINE, *capabilities, workers=[(os.getpid(), decoding.metrics.counts["proposer_propose_calls"])])

    return note


@pytest.fixture(scope="module")
def inputs(batch):
    """Three prompts of different lengths, padded on the left, of which the longest has no padding."""
    return padded([ids[:length] for ids, length in zip(batch, (9, 31, 22), strict=False)])


@pytest.fixture(scope="module")
def plain(model, inputs):
    return model.generate(**inputs, **GREEDY)


@pytest.fixture(scope="module")
def ngram(model):
    return speculative(model, SHIPPED["ngram"], max_num_seqs=NUM_ROWS)


@pytest.fixture(scope="module")
def eagle3(model):
    return speculative(model, SHIPPED["eagle3"], max_num_seqs=NUM_ROWS)


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def alone(inputs, row):
    """The same without the other rows and without padding."""
    ids, mask = inputs["input_ids"][row], inputs["attention_mask"][row]
    return ids[mask == 1][None]


def longer(mask, ids):
    """The mask of a text that has grown."""
    return torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)


@pytest.mark.parametrize("name", ["ngram", "eagle3", "draft_model"])
def test_greedy_text_of_every_row_is_that_of_plain_generate(model, tokenizer, inputs, plain, record, name):
    decoding = speculative(model, SHIPPED[name], tokenizer=tokenizer, max_num_seqs=NUM_ROWS)
    assert torch.equal(model.generate(**inputs, custom_generate=decoding, **GREEDY), plain)
    record(decoding, "several requests at a time")
    single = speculative(model, SHIPPED[name], tokenizer=tokenizer)
    for row in range(NUM_ROWS):
        model.generate(alone(inputs, row), custom_generate=single, **GREEDY)
    assert decoding.metrics.acceptance == single.metrics.acceptance, "each row is drafted for as if it were alone"
    assert decoding.metrics.acceptance.num_accepted_tokens > 0


@pytest.mark.parametrize("decoding", ["ngram", "eagle3"])
def test_rows_end_at_different_times_and_go_on_with_padding(model, inputs, plain, request, decoding):
    decoding, width = request.getfixturevalue(decoding), inputs["input_ids"].shape[1]
    ends = {"eos_token_id": [int(plain[0, width + 3]), int(plain[2, width + 8])]}
    expected = model.generate(**inputs, **GREEDY | ends)
    assert len({int((row != 0).sum()) for row in expected[:, width:]}) > 1, "they end at different times"
    assert torch.equal(model.generate(**inputs, custom_generate=decoding, **GREEDY | ends), expected)


def test_a_row_that_ended_goes_on_with_the_first_end_token_where_there_is_no_padding(
    model, inputs, plain, ngram, monkeypatch
):
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    ends = [next(int(token) for token in plain[0, inputs["input_ids"].shape[1] + 3 :] if token % 8), 4000]
    assert next(iter({*ends})) == 4000, "a set has the other one first"
    settings = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False, "eos_token_id": torch.tensor(ends)}
    expected = model.generate(**inputs, **settings)
    assert expected[0, -1] == ends[0]
    assert torch.equal(model.generate(**inputs, custom_generate=ngram, **settings), expected)


class AfterTwo(StoppingCriteria):
    """Ends a row at the second occurrence of one of its tokens."""

    def __init__(self, start):
        self.start = start

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([len(set(row.tolist())) < len(row) for row in input_ids[:, self.start :]])


def test_stopping_criteria_are_asked_of_every_row_after_every_token(model, inputs, plain, ngram):
    width = inputs["input_ids"].shape[1]
    criteria = StoppingCriteriaList([AfterTwo(width)])
    ends = GREEDY | {"eos_token_id": 4095}  # without an end token, plain `generate` goes on with ended rows
    expected = model.generate(**inputs, stopping_criteria=criteria, **ends)
    found = model.generate(**inputs, stopping_criteria=criteria, custom_generate=ngram, **ends)
    assert torch.equal(found, expected)
    assert found.shape[1] < plain.shape[1]


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2, "min_new_tokens": 8}])
def test_logits_processors_see_each_row_as_plain_generate_shows_it(model, inputs, ngram, settings):
    found = model.generate(**inputs, custom_generate=ngram, **GREEDY | settings)
    assert torch.equal(found, model.generate(**inputs, **GREEDY | settings))


class Listener:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.given.append("end")


def test_a_streamer_is_given_what_plain_generate_gives_it(model, inputs, plain, ngram):
    width = inputs["input_ids"].shape[1]
    ends = GREEDY | {"eos_token_id": int(plain[0, width + 3])}
    theirs, ours = Listener(), Listener()
    model.generate(**inputs, streamer=theirs, **ends)
    model.generate(**inputs, custom_generate=ngram, token_streamer=ours, **ends)
    assert ours.given == theirs.given


def test_scores_and_logits_are_those_of_plain_generate_while_a_row_lasts(model, inputs, plain, ngram):
    width = inputs["input_ids"].shape[1]
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    asked |= GREEDY | {"eos_token_id": int(plain[0, width + 3])}
    found, expected = model.generate(**inputs, custom_generate=ngram, **asked), model.generate(**inputs, **asked)
    assert torch.equal(found.sequences, expected.sequences)
    lasts = torch.stack([expected.sequences[:, width + step] != 0 for step in range(len(expected.scores))])
    for ours, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        assert len(ours) == len(theirs)
        torch.testing.assert_close(torch.stack(ours)[lasts], torch.stack(theirs)[lasts], rtol=1e-3, atol=1e-3)


def test_a_seed_gives_the_same_samples_with_and_without_drafts(model, inputs, ngram):
    silent = {"method": "adapter_proposers:Silent", "num_speculative_tokens": 1}
    texts = []
    for decoding in (ngram, speculative(model, silent, max_num_seqs=NUM_ROWS)):
        torch.manual_seed(3)
        settings = {"do_sample": True, "temperature": 0.6, "max_new_tokens": 12, "pad_token_id": 0}
        texts.append(model.generate(**inputs, custom_generate=decoding, **settings))
    assert torch.equal(*texts)


@pytest.mark.parametrize(("proposer", "lossless"), [("Drawn", True), ("Lying", False)])
def test_samples_of_a_batch_have_the_exact_distribution_and_a_lie_shows(five_tokens, record, proposer, lossless):
    config = {"method": f"adapter_proposers:{proposer}", "num_speculative_tokens": 2}
    decoding = speculative(five_tokens, config | {"draft_sample_method": "probabilistic"}, max_num_seqs=100)
    statistic, degrees = chi_square(five_tokens, decoding, 300, at_a_time=100)
    assert (statistic <= tail_bound(degrees)) == lossless
    if lossless:
        record(decoding, "sampled text follows the target's distribution", "several requests at a time")


@pytest.mark.parametrize("sees_padding", [False, True])
@pytest.mark.parametrize("decoding", ["ngram", "eagle3"])
def test_the_returned_cache_goes_on_as_that_of_plain_generate(model, inputs, plain, request, decoding, sees_padding):
    decoding, width = request.getfixturevalue(decoding), inputs["input_ids"].shape[1]
    settings = GREEDY | {"eos_token_id": int(plain[0, width + 3]), "return_dict_in_generate": True}
    texts = []
    for own in ({}, {"custom_generate": decoding}):
        first = model.generate(**inputs, **own, **settings)
        assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
        mask = longer(inputs["attention_mask"], first.sequences)
        mask[0, width + 4 :] = int(sees_padding)  # what follows the end of its row
        more = torch.cat([first.sequences, torch.tensor([[5, 6], [7, 8], [9, 10]])], dim=1)
        going_on = {"past_key_values": first.past_key_values, "attention_mask": longer(mask, more)}
        texts.append(model.generate(more, **going_on, **GREEDY))
    assert torch.equal(*texts)


@pytest.fixture(scope="module")
def begun(model, inputs):
    """A batch whose first tokens were computed: the cache, and the inputs of what follows."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :-4], attention_mask=mask[:, :-4], position_ids=positions(mask[:, :-4]), past_key_values=cache)
    return cache, inputs


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def widths_of_passes(model, run):
    """The tokens of each row in every pass of the model."""
    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        return run(), seen
    finally:
        handle.remove()


@pytest.mark.parametrize(("name", "first_pass"), [("ngram", 4), ("eagle3", 31)])
def test_a_text_goes_on_from_a_filled_cache(model, begun, plain, request, record, name, first_pass):
    decoding, (cache, inputs) = request.getfixturevalue(name), begun
    cache = deepcopy(cache)
    settings = GREEDY | {"past_key_values": cache, "custom_generate": decoding}
    found, widths = widths_of_passes(model, lambda: model.generate(**inputs, **settings))
    assert torch.equal(found, plain)
    assert widths[0] == first_pass, "a drafter with keys and values of its own has to see the whole text"
    assert cache.get_seq_length() == found.shape[1] - 1, "it is the caller's cache that has grown"
    if name == "eagle3":
        record(decoding, "a draft network beside a prefix cache")


@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_a_conversation_of_one_row_keeps_its_cache(model, prompts, request, name):
    decoding = request.getfixturevalue(name)
    texts = []
    for own in ({}, {"custom_generate": decoding}):
        cache, ids = DynamicCache(), prompts[0]
        for turn in ([17, 18], [19]):
            ids = model.generate(ids, past_key_values=cache, **own, **GREEDY | {"max_new_tokens": 9})
            assert cache.get_seq_length() == ids.shape[1] - 1
            ids = torch.cat([ids, torch.tensor([turn])], dim=1)
        texts.append(ids)
    assert torch.equal(*texts)


@pytest.mark.parametrize(("name", "begins"), [("NotesStarts", 17), ("NotesStartsOfWhole", 0)])
def test_a_proposer_that_asks_for_the_whole_prompt_is_shown_what_the_cache_holds_too(model, name, begins):
    decoding = speculative(model, {"method": f"adapter_proposers:{name}", "num_speculative_tokens": 2})
    cache, ids = DynamicCache(), torch.arange(3, 12)[None]
    ids = model.generate(ids, past_key_values=cache, **GREEDY | {"max_new_tokens": 9})
    NotesStarts.seen.clear()
    found = model.generate(ids, past_key_values=deepcopy(cache), custom_generate=decoding, **GREEDY)
    assert torch.equal(found, model.generate(ids, past_key_values=cache, **GREEDY))
    assert NotesStarts.seen[0] == begins


def test_what_has_left_a_window_is_not_missed():
    torch.manual_seed(0)
    config = small_config("mistral")
    config.sliding_window = 8
    model = small_model(config)
    model.generation_config.eos_token_id = None
    inputs = padded([list(range(3, 27)), list(range(40, 51))])
    plain = model.generate(**inputs, **GREEDY)
    decoding = speculative(model, SHIPPED["ngram"], max_model_len=128, max_num_seqs=2)
    assert torch.equal(model.generate(**inputs, custom_generate=decoding, **GREEDY), plain)
    cache, mask = DynamicCache(config=config), inputs["attention_mask"]
    begun = {"attention_mask": mask[:, :-2], "position_ids": positions(mask[:, :-2]), "past_key_values": cache}
    with torch.no_grad():
        model(inputs["input_ids"][:, :-2], **begun)
    assert cache.layers[0].keys.shape[2] < cache.get_seq_length(), "the cache has forgotten tokens"
    found = model.generate(**inputs, past_key_values=cache, custom_generate=decoding, **GREEDY)
    assert torch.equal(found, plain)


def test_what_a_batch_or_a_cache_cannot_have_is_refused_by_name(model, prompts, inputs, ngram):
    def refused(told, ids, **settings):
        with pytest.raises(RequestError, match=told):
            model.generate(ids, custom_generate=ngram, **GREEDY | settings)

    ids = prompts[0]
    refused("a batch of 4", ids.expand(4, -1))
    refused(r"max_num_seqs=4", ids, num_return_sequences=4, do_sample=True)
    refused("PrefixConstrained", inputs["input_ids"], prefix_allowed_tokens_fn=lambda row, text: [1, 2])
    cache = DynamicCache()
    model(ids[:, :9], past_key_values=cache)
    refused("position_ids of its own", ids[:, 9:], past_key_values=cache, attention_mask=torch.ones_like(ids))
    refused("lacks at least the last token", ids[:, :9], past_key_values=cache)
    static = StaticCache(model.config, max_cache_len=512)
    model(ids[:, :-1], past_key_values=static)
    refused("a StaticCache with tokens in it", ids, past_key_values=static)
    mask = torch.ones_like(ids)
    mask[0, 2] = 0
    refused("holes", ids, attention_mask=mask)
