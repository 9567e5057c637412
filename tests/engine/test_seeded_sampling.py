"""A seed gives one text: with any drafts or none, alone or in any batch, in any order."""

from __future__ import annotations

import warnings

import pytest
import torch
from engine_helpers import counter, make_llm, tokens

from specdec import SamplingParams
from specdec.core.cache.transfer import upload
from specdec.core.kernels.philox import Stream, uniform
from specdec.core.rejection.sampler import sample as draw
from specdec.core.rejection.types import Uniforms
from specdec.core.request.request import Request
from specdec.core.runner.batch import SamplingTable

pytestmark = pytest.mark.filterwarnings("default:tie")
VARIANTS = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
)
NUM_TOKENS = 24


def params_for(index, **changes):
    values = VARIANTS[index % len(VARIANTS)] | {"seed": 1000 + index, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(**values | changes)


def sample(llm, prompts, indices):
    """Outputs of the requests with these indices, run together in this order, by index."""
    asked = [{"prompt_token_ids": prompts[index]} for index in indices]
    outputs = llm.generate(asked, [params_for(index) for index in indices])
    return dict(zip(indices, tokens(outputs), strict=True))


NEARNESS = 1e-5


def assert_same_up_to_ties(found, expected, prompts, model):
    """Texts by request index are equal, or part where the uniform lies at a boundary of the distribution (see
    decision 0023).

    At most one request may part, and only one whose logits are not adjusted by earlier tokens.
    """
    parted = [index for index in found if found[index] != expected[index]]
    assert found.keys() <= expected.keys()
    assert len(parted) <= 1, f"requests {parted} differ"
    for index in parted:
        ours, theirs = found[index], expected[index]
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        low, high = tokens_around(params_for(index), [*prompts[index], *theirs[:at]], model)
        assert low <= min(ours[at], theirs[at]) <= max(ours[at], theirs[at]) <= high, f"request {index}, token {at}"
        warnings.warn(f"tie: request {index}, token {at}: {ours[at]} or {theirs[at]}", TieWarning, stacklevel=2)


class TieWarning(UserWarning):
    """Two texts part at a floating-point tie."""


def tokens_around(params, token_ids, model):
    """The tokens that a uniform just below and just above the request's own would draw, from fp64 probabilities."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, -1:].double()
    request = Request("r", token_ids, params, params.seed, 0, frozenset(), None)
    table = SamplingTable()
    integers, floats = table.columns([request])
    sent = upload(integers, torch.device("cpu"), floats)
    rows = table.rows([request], sent[: len(integers)], sent[len(integers) :])
    number = uniform(rows.seed, rows.position, Stream.RESAMPLE)
    around = [Uniforms((number + shift).clamp(0, 1)[:, None]) for shift in (-NEARNESS, NEARNESS)]
    return [int(draw(logits, rows, each).output_ids[0, 0]) for each in around]


@pytest.fixture(scope="module")
def plain_llm():
    return make_llm()


@pytest.fixture(scope="module")
def plain(plain_llm, prompts):
    return sample(plain_llm, prompts, range(8))


@pytest.fixture(scope="module")
def sampled_sequences(plain, prompts):
    return [[*prompts[index], *output] for index, output in plain.items()]


def test_a_tie_is_told_from_a_bug(plain, prompts, reference_model):
    """The check itself: the drawn token lies around its uniform, and a wrong token does not."""
    low, high = tokens_around(params_for(0), prompts[0], reference_model)
    assert low <= plain[0][0] <= high
    wrong = {0: [(plain[0][0] + 500) % 4096, *plain[0][1:]]}
    with pytest.raises(AssertionError):
        assert_same_up_to_ties(wrong, plain, prompts, reference_model)


def test_a_request_alone_equals_itself_in_a_batch(plain_llm, plain, prompts, reference_model):
    alone = {index: sample(plain_llm, prompts, [index])[index] for index in range(0, 8, 2)}
    assert_same_up_to_ties(alone, plain, prompts, reference_model)


def test_the_order_of_a_batch_changes_nothing(plain_llm, plain, prompts, reference_model):
    assert_same_up_to_ties(sample(plain_llm, prompts, range(7, -1, -1)), plain, prompts, reference_model)


@pytest.mark.parametrize(
    ("proposer", "options"),
    [("ngram", {}), ("Noise", {}), ("Scripted", {"wrong_every": 4}), ("Scripted", {"wrong_every": 5, "ragged": True})],
    ids=["ngram", "noise", "sometimes", "ragged"],
)
def test_drafts_change_nothing(proposer, options, plain, prompts, sampled_sequences, reference_model):
    known = {"sequences": sampled_sequences} if proposer == "Scripted" else {}
    llm = make_llm(proposer, options=options | known)
    assert_same_up_to_ties(sample(llm, prompts, range(8)), plain, prompts, reference_model)
    assert counter(llm, "spec_decode_num_draft_tokens") > 0
    assert_same_up_to_ties(sample(llm, prompts, [3]), plain, prompts, reference_model)


def test_drafting_the_sampled_text_is_accepted_whole(plain, prompts, sampled_sequences, reference_model):
    llm = make_llm("Scripted", options={"sequences": sampled_sequences})
    found = sample(llm, prompts, range(8))
    assert_same_up_to_ties(found, plain, prompts, reference_model)
    drafted, accepted = (counter(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    assert drafted == accepted > 0 or found != plain


def test_chunks_and_preemption_change_nothing(plain, prompts, sampled_sequences, reference_model):
    options = {"sequences": sampled_sequences, "wrong_every": 5, "ragged": True}
    llm = make_llm("Scripted", options=options, num_kv_blocks=20, max_num_batched_tokens=48)
    assert_same_up_to_ties(sample(llm, prompts, range(8)), plain, prompts, reference_model)
    assert counter(llm, "num_preemptions") > 0


def test_different_seeds_give_different_texts(plain_llm, prompts):
    asked = [{"prompt_token_ids": prompts[0]}] * 4
    outputs = plain_llm.generate(asked, [params_for(0, seed=seed) for seed in (1, 2, -1, 2**63 - 1)])
    assert len({tuple(output) for output in tokens(outputs)}) == 4


def test_unseeded_requests_repeat_with_the_seed_of_the_engine(prompts):
    asked = [{"prompt_token_ids": prompts[0]}] * 3
    params = params_for(0, seed=None)
    first, again, other = (tokens(make_llm(seed=seed).generate(asked, params)) for seed in (5, 5, 6))
    assert first == again
    assert all(ours != theirs for ours, theirs in zip(first, other, strict=True))
    assert len({tuple(output) for output in first}) == 3, "requests of one engine share no random numbers"


def test_outputs_of_one_prompt_differ_and_repeat(plain_llm, prompts):
    asked, params = {"prompt_token_ids": prompts[0]}, params_for(0, seed=7, n=3)
    (first,), (again,) = plain_llm.generate(asked, params), plain_llm.generate(asked, params)
    assert [output.token_ids for output in first.outputs] == [output.token_ids for output in again.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in first.outputs}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["probs", "logits", "sparse", "mixed"])
def test_reported_distributions_give_one_text_per_seed_in_any_batch(kind, prompts, sampled_sequences):
    llm = make_llm(
        "SparseDistributions" if kind == "sparse" else "DenseDistributions",
        options={"sequences": sampled_sequences, "kind": kind},
        speculative={"draft_sample_method": "probabilistic"},
    )
    together = sample(llm, prompts, range(4))
    assert sample(llm, prompts, [3, 1, 0, 2]) == together
    assert sample(llm, prompts, [0]) == {0: together[0]}
    assert counter(llm, "spec_decode_num_accepted_tokens") > 0
