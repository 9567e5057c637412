"""Siblings that were drawn with replacement, from proposer to verifier: the output has the target's distribution."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
import torch
from engine_helpers import counter, make_llm

from specdec import SamplingParams
from specdec.sdk import DistributionKind, Draft, DraftDistribution, Needs, ProposerConfig, StepView
from specdec.sdk.extensions import Trees

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
SAMPLED = {"top_k": 2, "temperature": 8.0, "ignore_eos": True}  # both of the likeliest tokens come up
COUNT = 512
LIMIT = 33.0  # of chi-square with 3 degrees of freedom: one false alarm in 3 million
DRAWN = (0.1, 0.9)  # far from the target's, so that a wrong rule is far off: by 0.12 to 0.18


class PutBack:
    """Draws two children of the newest token, each from the same distribution of two tokens."""

    needs = Needs(distributions=("sparse",), sparse_top_m=2, extensions=(Trees(),))
    likeliest: ClassVar[dict[int, list[int]]] = {}  # the target's two after each token

    def __init__(self, config: ProposerConfig) -> None:
        self.width = config.num_draft_tokens

    def propose(self, step: StepView) -> Draft:
        known = [token in self.likeliest and budget >= 2 for token, budget in self.asked(step)]
        table = torch.tensor([self.likeliest.get(token, [0, 1]) for token, _ in self.asked(step)])
        drawn = torch.stack([step.random.uniform(node) >= DRAWN[0] for node in range(2)], dim=1)
        said = DraftDistribution(
            kind=torch.full((len(step),), DistributionKind.SPARSE, dtype=torch.uint8),
            sparse_ids=table[:, None].repeat(1, 2, 1),
            sparse_probs=torch.tensor(DRAWN).repeat(len(step), 2, 1),
            replacement=True,
        )
        lengths = torch.where(torch.tensor(known), 2, 0)
        return Draft(table.gather(1, drawn.long()), lengths, distribution=said, parents=torch.full((len(step), 2), -1))

    @staticmethod
    def asked(step: StepView) -> list[tuple[int, int]]:
        return list(zip(step.newest_token.tolist(), step.budget.tolist(), strict=True))


def after(text: list[int]) -> dict[int, float]:
    """The two tokens that the target samples after the prompt and this text, from the logprobs of plain decoding."""
    params = SamplingParams(**SAMPLED, logprobs=2, max_tokens=1)
    (output,) = make_llm().generate([{"prompt_token_ids": [*PROMPT["prompt_token_ids"], *text]}], params)
    likely = sorted(output.outputs[0].logprobs[0].items(), key=lambda each: -each[1])[:2]
    probs = (torch.tensor([logprob for _, logprob in likely]) / SAMPLED["temperature"]).softmax(0).tolist()
    return {token: prob for (token, _), prob in zip(likely, probs, strict=True)}


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], float]:
    first = after([])
    second = {token: after([token]) for token in first}
    PutBack.likeliest = {token: list(probs) for token, probs in second.items()}
    return {(a, b): first[a] * prob for a in first for b, prob in second[a].items()}


def chi_square(llm, expected: dict[tuple[int, int], float]) -> float:
    params = [SamplingParams(**SAMPLED, max_tokens=4, seed=seed) for seed in range(COUNT)]
    found = Counter(tuple(each.outputs[0].token_ids[:2]) for each in llm.generate([PROMPT] * COUNT, params))
    assert found.keys() <= expected.keys()
    return sum((found[text] - COUNT * prob) ** 2 / (COUNT * prob) for text, prob in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_output_has_the_targets_distribution(rule, expected):
    speculative = {
        "method": f"{__name__}:PutBack",
        "rejection_sample_method": rule,
        "draft_sample_method": "probabilistic",
    }
    llm = make_llm("ngram", k=2, speculative=speculative, max_model_len=32, max_num_seqs=64)
    assert chi_square(llm, expected) < LIMIT
    assert counter(llm, "spec_decode_num_accepted_tokens") > COUNT / 4
