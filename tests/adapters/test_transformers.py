"""specdec proposers inside `model.generate`."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
import transformers
from adapter_proposers import Told, Watching
from everywhere import Witness
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from specdec import LLM, SamplingParams
from specdec.adapters.transformers import speculative
from specdec.sdk import ConfigError, ProposerError, Refusal
from specdec.sdk.errors import RequestError
from specdec.sdk.packaged import packaged

ENGINE = f"transformers {transformers.__version__}, CPU"
SHIPPED = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "draft_model": {"model": "tiny/draft", "num_speculative_tokens": 4},
    "eagle": {"model": "tiny/eagle", "num_speculative_tokens": 3},
    "eagle3": {"model": "tiny/eagle3", "num_speculative_tokens": 4},
    "dflash": {"model": "tiny/dflash", "num_speculative_tokens": 4},
    "medusa": {"model": "tiny/medusa", "num_speculative_tokens": 2},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "chain": {
        "method": "adapter_proposers:LookUpThenHead",
        "model": str(packaged("tiny/eagle3")),
        "num_speculative_tokens": 3,
    },
}
COUNTING = {"method": "adapter_proposers:Counting", "num_speculative_tokens": 3}
NUM_NEW_TOKENS = 24
SHOWN = {
    **dict.fromkeys(("ngram", "suffix"), "host proposers"),
    **dict.fromkeys(
        ("draft_model", "eagle", "eagle3", "dflash", "medusa", "mtp"), "a draft network with KV of its own"
    ),
    "chain": "several proposers in one (a combinator)",
}


@pytest.fixture
def record(shown):
    """Note what `generate` showed."""

    def note(decoding, *capabilities, refused=None):
        calls = [] if decoding is None else [(os.getpid(), decoding.metrics.counts["proposer_propose_calls"])]
        shown(ENGINE, *capabilities, workers=calls, refused=refused)

    return note


@pytest.fixture(scope="module")
def counting(model):
    return speculative(model, COUNTING)


@pytest.fixture(scope="module")
def drafting(model):
    """Drafts that are often accepted."""
    return speculative(model, SHIPPED["ngram"])


def small_model_of_five(head_dim=16, seed=0):
    """A random model whose texts can be enumerated."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=5,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=32,
        initializer_range=0.7,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


small_model = pytest.fixture(scope="module")(small_model_of_five)


@pytest.fixture(scope="module")
def truth(model, prompts):
    """What plain `generate` says to each prompt."""
    return [greedy(model, ids) for ids in prompts]


def greedy(model, ids, **settings):
    return model.generate(ids, **({"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False} | settings))


@pytest.mark.parametrize("name", SHIPPED)
def test_greedy_text_is_that_of_plain_generate(model, tokenizer, prompts, truth, record, name):
    decoding = speculative(model, SHIPPED[name], tokenizer=tokenizer)
    for ids, text in zip(prompts, truth, strict=True):
        assert torch.equal(greedy(model, ids, custom_generate=decoding), text)
    assert decoding.metrics.acceptance.num_accepted_tokens > 0
    record(decoding, SHOWN[name])


@pytest.mark.parametrize("name", ["eagle3", "suffix"])
def test_as_many_drafts_are_accepted_as_in_our_engine(model, prompts, name):
    ids = prompts[1]
    decoding = speculative(model, SHIPPED[name])
    model.generate(ids, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, custom_generate=decoding)
    llm = LLM("tiny", speculative_config=SHIPPED[name])
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
    llm.generate([{"prompt_token_ids": ids[0].tolist()}], params)
    assert decoding.metrics.acceptance == llm.engine.metrics.acceptance


def distribution_of(model, prompt, num_tokens, processors):
    """The probability of every continuation, from passes over the whole text: [V] * num_tokens."""
    vocab_size = model.config.vocab_size
    distribution = torch.zeros([vocab_size] * num_tokens, dtype=torch.float64)
    for tokens in product(range(vocab_size), repeat=num_tokens):
        ids = torch.cat([prompt, torch.tensor([tokens])], dim=1)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
        probability = 1.0
        for i, token in enumerate(tokens):
            scores = processors(ids[:, : prompt.shape[1] + i], logits[i : i + 1].clone())
            probability *= float(scores[0].double().softmax(0)[token])
        distribution[tokens] = probability
    return distribution


def chi_square(model, decoding, num_samples, at_a_time=1):
    """Against the exact distribution of three tokens, and the degrees of freedom."""
    prompt = torch.tensor([[1, 2, 3]])
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 4, "max_new_tokens": 3, "custom_generate": decoding}
    distribution = distribution_of(
        model, prompt, 3, LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)])
    )
    counts = torch.zeros_like(distribution)
    torch.manual_seed(11)
    for _ in range(num_samples // at_a_time):
        for text in model.generate(prompt.expand(at_a_time, -1), **settings):
            counts[tuple(text[3:].tolist())] += 1
    return chi_square_of(counts, distribution)


def chi_square_of(counts, distribution):
    """As `chi_square`: how often each text was seen, and its probability."""
    num_samples = counts.sum()
    possible = distribution > 0
    assert counts[~possible].sum() == 0
    expected = distribution[possible] * num_samples
    common = expected >= 5  # rare texts in one cell
    observed = torch.cat([counts[possible][common], counts[possible][~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    return float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1


def tail_bound(degrees):
    """Above this a chi-square variable lies with a probability of at most 1e-6 (Laurent and Massart 2000)."""
    x = 13.82
    return degrees + 2 * (degrees * x) ** 0.5 + 2 * x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "num_samples", "lossless"),
    [
        ("Drawn", 250, True),
        ("Lying", 120, False),
        pytest.param("Drawn", 4000, True, marks=pytest.mark.full),
        pytest.param("Counting", 4000, True, marks=pytest.mark.full),
    ],
)
def test_sampled_text_has_the_exact_distribution_and_a_lie_about_the_draft_distribution_shows(
    small_model, record, proposer, num_samples, lossless
):
    config = {"method": f"adapter_proposers:{proposer}", "num_speculative_tokens": 2}
    if proposer != "Counting":
        config["draft_sample_method"] = "probabilistic"
    decoding = speculative(small_model, config)
    statistic, degrees = chi_square(small_model, decoding, num_samples)
    assert (statistic <= tail_bound(degrees)) == lossless
    reports = proposer != "Counting"
    record(
        decoding,
        *(["sampled text follows the target's distribution"] if lossless else []),
        *(["draft probabilities in verification"] if reports else []),
    )


def test_a_seed_gives_the_same_sample_with_and_without_drafts(model, prompts, drafting):
    silent = speculative(model, {"method": "adapter_proposers:Silent", "num_speculative_tokens": 1})
    texts = []
    for decoding in (drafting, silent, drafting):
        torch.manual_seed(3)
        settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
        texts.append(model.generate(prompts[0], max_new_tokens=16, custom_generate=decoding, **settings))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 8},
        {"suppress_tokens": [5, 6, 7, 8]},
        {"prefix_allowed_tokens_fn": lambda _, ids: list(range(len(ids) % 3, 4000, 3))},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_logits_processors_see_what_they_see_in_plain_generate(model, prompts, drafting, settings):
    assert torch.equal(
        greedy(model, prompts[0], custom_generate=drafting, **settings), greedy(model, prompts[0], **settings)
    )


def test_padding_on_the_left_changes_nothing(model, prompts, truth, drafting):
    ids = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prompts[0]], dim=1)
    mask = (torch.arange(ids.shape[1]) >= 3).long()[None]
    found = greedy(model, ids, attention_mask=mask, custom_generate=drafting)
    assert torch.equal(found, greedy(model, ids, attention_mask=mask))
    assert torch.equal(found[:, 3:], truth[0])


@pytest.mark.parametrize("at", [1, 2, 5])
def test_ends_at_an_end_token_inside_the_drafts(model, prompts, truth, drafting, at):
    text = truth[0][0, prompts[0].shape[1] :].tolist()
    ends = {"eos_token_id": [text[at], 4000], "pad_token_id": 0}
    found = greedy(model, prompts[0], custom_generate=drafting, **ends)
    assert torch.equal(found, greedy(model, prompts[0], **ends))
    assert found.shape[1] <= prompts[0].shape[1] + at + 1


class AfterToken(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_ends_where_a_stopping_criterion_or_the_length_says(model, prompts, truth, drafting, length):
    total = prompts[0].shape[1] + length
    criteria = StoppingCriteriaList([AfterToken(total)])
    found = greedy(model, prompts[0], custom_generate=drafting, stopping_criteria=criteria)
    assert torch.equal(found, truth[0][:, :total])
    assert torch.equal(greedy(model, prompts[0], custom_generate=drafting, max_new_tokens=length), found)


def test_returns_scores_logits_and_a_cache_that_can_go_on(model, prompts, drafting):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    found = greedy(model, prompts[0], custom_generate=drafting, **asked)
    plain = greedy(model, prompts[0], **asked)
    assert torch.equal(found.sequences, plain.sequences)
    assert len(found.scores) == len(found.logits) == NUM_NEW_TOKENS
    torch.testing.assert_close(torch.cat(found.scores), torch.cat(plain.scores), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.cat(found.logits), torch.cat(plain.logits), rtol=1e-3, atol=1e-3)
    assert found.past_key_values.get_seq_length() == found.sequences.shape[1] - 1


def test_a_streamer_is_given_every_token(model, tokenizer, prompts, drafting, capsys):
    found = greedy(model, prompts[0], custom_generate=drafting, token_streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out.strip() == tokenizer.decode(found[0]).strip()


def test_proposers_see_the_callers_sampling_parameters_and_the_models_hidden_states(model, prompts, record):
    decoding = speculative(model, {"method": "adapter_proposers:Watching", "num_speculative_tokens": 2})
    Watching.seen.clear()
    Watching.hidden.clear()
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "max_new_tokens": 6}
    model.generate(prompts[0], custom_generate=decoding, **settings)
    assert set(Watching.seen) == {(0.5, 9, 0.8, 0.0)}
    model.generate(prompts[0], custom_generate=decoding, do_sample=True, max_new_tokens=2)
    assert Watching.seen[-1] == (1.0, 50, 1.0, 0.0)  # transformers samples from the 50 most likely unless told
    with torch.no_grad():
        plain = model(prompts[0], output_hidden_states=True).hidden_states
    width = model.config.hidden_size
    for place, k in [(0, 0), (1, 2), (3, len(plain) - 1)]:
        torch.testing.assert_close(Watching.hidden[0][:, place * width : (place + 1) * width], plain[k][0])
    record(decoding, "sampling parameters", "hidden states, final and between layers")


def test_states_belong_to_the_kept_rows_and_the_models_head_is_shared(model, prompts, truth, record):
    decoding = speculative(
        model, {"method": "everywhere:EarlyExit", "num_speculative_tokens": 3, "on_proposer_error": "raise"}
    )
    for ids, text in zip(prompts, truth, strict=True):
        assert torch.equal(greedy(model, ids, custom_generate=decoding), text)
    assert decoding.metrics.counts["proposer_propose_calls"] > 0, "it looked at each step, and raises if one is wrong"
    record(decoding, "hidden states, final and between layers", "the target's embedding and head")


def test_requests_start_and_finish_once_and_keep_their_row(model, prompts, truth, record):
    Witness.events.clear()
    settings = {"on_proposer_error": "raise", "proposer_config": {"top_k": 50}}  # generate's own unless it is told
    decoding = speculative(model, {"method": "everywhere:Witness", "num_speculative_tokens": 3} | settings)
    for ids, text in zip(prompts, truth, strict=True):
        assert torch.equal(greedy(model, ids, custom_generate=decoding), text)
    assert Witness.events["start"] == Witness.events["finish"] == len(prompts)
    record(decoding, "start and finish are told, rows are stable")


def test_a_call_has_the_request_options_that_hold_where_nobody_gives_any(model, prompts):
    Told.options.clear()
    decoding = speculative(model, {"method": "adapter_proposers:Told", "num_speculative_tokens": 2})
    greedy(model, prompts[0], custom_generate=decoding)
    assert [language for _, language in Told.options] == ["any"]


def test_the_model_is_left_as_it_was(model, prompts, counting):
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    attention = model.config._attn_implementation
    decoding = speculative(model, SHIPPED["eagle3"])
    greedy(model, prompts[0], custom_generate=decoding)
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("policy", ["raise", "skip_step", "disable"])
def test_a_failing_proposer_is_contained_as_asked(model, prompts, truth, record, policy):
    config = {"method": "adapter_proposers:Failing", "num_speculative_tokens": 2, "on_proposer_error": policy}
    decoding = speculative(model, config)
    if policy == "raise":
        with pytest.raises(ProposerError, match="no idea"):
            greedy(model, prompts[0], custom_generate=decoding)
        with pytest.raises(ProposerError, match="no idea"):  # the failed call left nothing behind
            greedy(model, prompts[0], custom_generate=decoding)
    else:
        assert torch.equal(greedy(model, prompts[0], custom_generate=decoding), truth[0])
    record(decoding, "a failing proposer is handled as asked")


def test_no_misuse_ends_a_call(model, prompts, truth, record):
    config = {"method": "everywhere:Misuser", "num_speculative_tokens": 3, "on_proposer_error": "skip_step"}
    decoding = speculative(model, config)
    for ids, text in zip(prompts, truth, strict=True):
        assert torch.equal(greedy(model, ids, custom_generate=decoding), text)
    assert set(decoding.metrics.proposer_errors) == {"SD-E200", "SD-E201", "SD-E203", "SD-E210"}
    record(decoding, "misuse ends nothing")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, "a batch of 2"),
        ({"num_beams": 2}, "beam_search"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states=True"),
        ({"max_new_tokens": 100_000}, "max_length allows"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_offered_is_refused_by_name(model, prompts, counting, settings, told):
    with pytest.raises(RequestError, match="SD-E197") as raised:
        greedy(model, prompts[0], custom_generate=counting, **settings)
    assert told in str(raised.value)


def test_the_targets_most_likely_tokens_are_shown(model, prompts, record):
    decoding = speculative(model, {"method": "specdec.plugins.token_recycling:TokenRecyclingProposer"})
    drafted = greedy(model, prompts[0], custom_generate=decoding, max_new_tokens=32)
    assert torch.equal(drafted, greedy(model, prompts[0], max_new_tokens=32))
    assert decoding.metrics.acceptance.num_accepted_tokens > 4
    record(decoding, "the target's most likely tokens")


@pytest.mark.parametrize(
    ("method", "capability"),
    [
        ("everywhere:CacheReader", "the target's keys and values"),
        ("specdec.plugins.layer_skip.proposer:LayerSkipProposer", "the target's own layers"),
    ],
)
def test_the_targets_cache_is_the_calls_and_so_refused(model, record, method, capability):
    with pytest.raises(Refusal, match="brings its own cache") as refused:
        speculative(model, {"method": method, "num_speculative_tokens": 2})
    record(None, capability, refused=refused.value.reason)


def test_another_model_is_refused(model, small_model, prompts, counting):
    with pytest.raises(ConfigError, match="another model"):
        greedy(small_model, torch.tensor([[1, 2]]), custom_generate=counting, max_new_tokens=4)
