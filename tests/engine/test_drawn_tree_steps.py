"""Drawn trees through the whole engine: the target's distribution, in batches of every kind of request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.plugins.eagle.proposer import Eagle3Proposer
from specdec.sdk import Draft, StepView

PROMPT = [5, 6, 7, 8, 9]
TOP = 3
LENGTH = 3
COUNT = 768
LIMIT = 80.0  # of chi-square with 26 degrees of freedom: one false alarm in 3 million
SETTINGS = {"model": "tiny/eagle3", "num_speculative_tokens": 3, "max_nodes": 6}


class Reversed(Eagle3Proposer):
    """Reports its distributions the wrong way round."""

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        said = draft.distribution
        if said is None or said.sparse_probs is None:
            return draft
        probs = said.sparse_probs.clone()
        probs[..., :TOP] = probs[..., :TOP].flip(-1)
        return replace(draft, distribution=replace(said, sparse_probs=probs))


def made(**more):
    config = {**SETTINGS, "draft_sample_method": "probabilistic", **more}
    return LLM("tiny", speculative_config=config, max_model_len=64, max_num_seqs=64)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], float]:
    """The target's probability of each text, from the logprobs of plain decoding."""
    llm, found = LLM("tiny", max_model_len=64), {(): 1.0}
    params = SamplingParams(temperature=1.0, top_k=TOP, logprobs=TOP, max_tokens=1, ignore_eos=True)
    for _ in range(LENGTH):
        outputs = llm.generate([{"prompt_token_ids": [*PROMPT, *text]} for text in found], params)
        after = {}
        for (text, prob), output in zip(found.items(), outputs, strict=True):
            likely = sorted(output.outputs[0].logprobs[0].items(), key=lambda each: -each[1])[:TOP]
            probs = torch.tensor([logprob for _, logprob in likely]).softmax(0).tolist()
            after |= {(*text, token): prob * p for (token, _), p in zip(likely, probs, strict=True)}
        found = after
    return found


def chi_square(llm, expected) -> float:
    params = [
        SamplingParams(temperature=1.0, top_k=TOP, max_tokens=LENGTH + 5, ignore_eos=True, seed=seed)
        for seed in range(COUNT)
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * COUNT, params)
    found = Counter(tuple(each.outputs[0].token_ids[:LENGTH]) for each in outputs)
    assert found.keys() <= expected.keys()
    return sum((found[text] - COUNT * prob) ** 2 / (COUNT * prob) for text, prob in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_output_has_the_targets_distribution(expected, rule):
    assert chi_square(made(rejection_sample_method=rule), expected) < LIMIT


@pytest.mark.full
def test_a_drafter_that_lies_about_its_distributions_is_seen(expected):
    method = f"{__name__}:Reversed"
    config = {**SETTINGS, "method": method, "draft_sample_method": "probabilistic"}
    llm = LLM("tiny", speculative_config=config, max_model_len=64, max_num_seqs=64)
    assert chi_square(llm, expected) > LIMIT


KINDS = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    {"temperature": 1.0, "top_p": 0.8, "frequency_penalty": 0.3, "logit_bias": {7: 2.0}},
    {"temperature": 0.0, "presence_penalty": 0.5},
)
BUDGETS = (None, 1, 0)  # a tree, a chain, and plain decoding


def asked():
    shared = {"max_tokens": 12, "ignore_eos": True}
    for seed, (kind, budget) in enumerate(product(KINDS, BUDGETS)):
        yield SamplingParams(**kind, **shared, seed=seed, num_speculative_tokens=budget)


def texts(llm, params):
    outputs = llm.generate([prompt(number) for number in range(len(params))], params)
    return [list(each.outputs[0].token_ids) for each in outputs]


def prompt(number):
    return {"prompt_token_ids": [*PROMPT, number % 3, *[4] * (number % 5)]}


@pytest.mark.slow
def test_requests_of_every_kind_share_steps_and_keep_their_texts():
    """Greedy rows have plain text, and a sampled row's text is that of the request alone."""
    params = list(asked())
    config = {**SETTINGS, "draft_sample_method": "probabilistic"}
    mixed, cut = (
        LLM("tiny", speculative_config=config, max_model_len=64, max_num_seqs=8, **settings)
        for settings in ({}, {"max_num_batched_tokens": 24, "block_size": 4})
    )
    found = texts(mixed, params)
    plain = texts(LLM("tiny", max_model_len=64, max_num_seqs=8), params)
    greedy = [number for number, each in enumerate(params) if each.temperature == 0]
    assert [found[number] for number in greedy] == [plain[number] for number in greedy]
    assert {len(text) for text in found} == {12}
    under_budgets = texts(cut, params)
    assert [under_budgets[number] for number in greedy] == [plain[number] for number in greedy]
    for number in (0, 6, 9):
        assert list(mixed.generate([prompt(number)], params[number])[0].outputs[0].token_ids) == found[number]
