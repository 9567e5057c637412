"""The proof has power: every known way to get the distribution wrong is seen, with two orders of magnitude to spare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.core.rejection import IMPOSSIBLE, NO_PROPOSAL, DistributionKind, DraftRows, verify
from specdec.core.rejection.exact_distribution import Problem, exact_distribution
from specdec.core.rejection.reference import Params

from .catalogue import MUTANTS
from .mutation import Mutant, mutated
from .problems import (
    DRAFTERS,
    SAMPLING,
    Drafter,
    Model,
    at_prefix,
    dense_probs,
    problem_of,
    random_model,
    tagged,
    with_lengths,
)

CAUGHT = 100 * 2e-7
SEEDS = (0, 1, 2, 3)
DOUBLE = torch.float64


def tiny(drafter: str, params: Params = SAMPLING["unit"], structure: str = "dense") -> Callable[[int], Problem]:
    def build(seed: int) -> Problem:
        model = random_model(seed, structure=structure)
        return problem_of(model, DRAFTERS[drafter](model, DOUBLE), params, DOUBLE)

    return build


def banned(sentinel: int) -> Callable[[int], Problem]:
    """A grammar bans a token that the drafter may draw; its id is lost and a sentinel stands in its place."""

    def build(seed: int) -> Problem:
        model = random_model(seed)
        one = torch.tensor(1)
        model = replace(model, target=[table.index_fill(-1, one, -torch.inf) for table in model.target])
        return changed(model, lambda ids: ids.masked_fill(ids == 1, sentinel))

    return build


def hole(seed: int) -> Problem:
    """Nothing was proposed at the second place, although a distribution stands there."""
    return changed(random_model(seed), lambda ids: ids.index_fill(1, torch.tensor(1), NO_PROPOSAL))


def changed(model: Model, change: Callable[[Tensor], Tensor]) -> Problem:
    """Drafts with dense distributions, whose ids are changed after the draw."""
    drawn = dense_probs(model, DOUBLE)

    def report(x: Tensor) -> DraftRows:
        rows = drawn.report(x)
        return replace(rows, token_ids=change(rows.token_ids))

    return problem_of(model, replace(drawn, report=report), SAMPLING["unit"], DOUBLE)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "dense": tiny("dense_probs"),
    "logits": tiny("dense_logits"),
    "sparse": tiny("sparse"),
    "mapped": tiny("mapped_probs"),
    "one_hot": tiny("one_hot"),
    "one_hot_temperature": tiny("one_hot", SAMPLING["temperature"]),
    "filtered": tiny("one_hot", Params(top_k=2, top_p=0.8)),
    "top_k": tiny("one_hot", SAMPLING["top_k"], structure="ties"),
    "top_p": tiny("one_hot", SAMPLING["top_p"]),
    "min_p": tiny("one_hot", Params(temperature=2.0, min_p=0.3)),
    "impossible": banned(IMPOSSIBLE),
    "hole": hole,
}


def variation(checked: Callable, problem: Problem, num_iterations: int = 24) -> float:
    return exact_distribution(checked, problem, num_iterations).total_variation


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_of_the_verifier_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    problems = [PROBLEMS[mutant.problem](seed) for seed in SEEDS]
    with mutated(mutant, tmp_path) as package:
        assert any(variation(package.verify, problem) >= CAUGHT for problem in problems)


@pytest.mark.parametrize("build", PROBLEMS.values(), ids=PROBLEMS)
def test_the_real_verifier_passes_the_same_problems(build: Callable[[int], Problem]) -> None:
    assert max(variation(verify, build(seed), num_iterations=40) for seed in SEEDS[:2]) <= 1e-11


def drawn_from_top_k_reported_raw(model: Model) -> Drafter:
    raw = dense_probs(model, DOUBLE)
    best = [distribution >= distribution.topk(2).values[..., -1:] for distribution in raw.distributions]
    kept = [
        distribution * mask / (distribution * mask).sum(-1, keepdim=True)
        for distribution, mask in zip(raw.distributions, best, strict=True)
    ]
    return replace(raw, distributions=kept)


def drawn_greedily_reported_soft(model: Model) -> Drafter:
    raw = dense_probs(model, DOUBLE)
    distributions = [
        torch.nn.functional.one_hot(distribution.argmax(-1), distribution.shape[-1]).double()
        for distribution in raw.distributions
    ]
    return replace(raw, distributions=distributions)


def drawn_hotter_than_reported(model: Model) -> Drafter:
    raw = dense_probs(model, DOUBLE)
    return replace(raw, distributions=[(table / 1.2).softmax(-1) for table in model.draft])


def reported_in_bfloat16_drawn_before_rounding(model: Model) -> Drafter:
    raw = dense_probs(model, DOUBLE)
    rounded = [distribution.bfloat16().double() for distribution in raw.distributions]
    return replace(raw, report=lambda x: tagged(x, DistributionKind.DENSE_PROBS, draft_probs=at_prefix(rounded, x)))


def trimmed_by_confidence_in_the_drawn_token(model: Model) -> Drafter:
    raw = dense_probs(model, DOUBLE)

    def confident(x: Tensor) -> Tensor:
        rows = raw.report(x)
        assert rows.distributions is not None
        assert rows.distributions.draft_probs is not None
        drawn = rows.distributions.draft_probs.gather(2, x.unsqueeze(2)).squeeze(2)
        return (drawn > 0.3).long().cumprod(1).sum(1)

    return with_lengths(raw, confident)


LYING_DRAFTERS = [
    drawn_from_top_k_reported_raw,
    drawn_greedily_reported_soft,
    drawn_hotter_than_reported,
    reported_in_bfloat16_drawn_before_rounding,
    trimmed_by_confidence_in_the_drawn_token,
]


@pytest.mark.parametrize("drafter", LYING_DRAFTERS)
def test_drafter_whose_report_is_not_its_distribution_is_caught(drafter: Callable[[Model], Drafter]) -> None:
    models = [random_model(seed) for seed in SEEDS]
    problems = [problem_of(model, drafter(model), SAMPLING["unit"], DOUBLE) for model in models]
    assert any(variation(verify, problem) >= CAUGHT for problem in problems)


def test_banned_draft_reported_as_no_proposal_is_caught() -> None:
    assert any(variation(verify, banned(NO_PROPOSAL)(seed)) >= CAUGHT for seed in SEEDS)


def test_any_trimming_is_lossless_for_one_hot_drafts() -> None:
    for seed in SEEDS:
        model = random_model(seed)
        trimmed = with_lengths(DRAFTERS["one_hot"](model, DOUBLE), lambda x: (x != 2).long().cumprod(1).sum(1))
        assert variation(verify, problem_of(model, trimmed, SAMPLING["unit"], DOUBLE), 40) <= 1e-11
