"""Drafts under a grammar: a refused one stays and is rejected. Two repairs that others make are biased, and seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.core.rejection import DraftRows, verify
from specdec.core.rejection.block import verify_block
from specdec.testing.rejection.exact_distribution import Problem, exact_distribution

from .problems import DRAFTERS, SAMPLING, Drafter, Model, at_prefix, dense_probs, problem_of, random_model, with_lengths

DOUBLE = torch.float64
RULES = {"standard": verify, "block": verify_block}


def masked_model(seed: int, vocab_size: int = 3, num_drafts: int = 2) -> Model:
    """After every prefix of the text the target may go on with some tokens only; the drafter knows nothing of it."""
    return random_model(seed, vocab_size, num_drafts, structure="zeros_p")


def under_the_mask(model: Model) -> Model:
    """A drafter that draws what is allowed, as the target's mask says."""
    draft = [
        table.masked_fill(target == -math.inf, -math.inf)
        for table, target in zip(model.draft, model.target, strict=False)
    ]
    return replace(model, draft=draft)


def refused(model: Model, drafts: Tensor) -> Tensor:
    """Which of drafts [T, K] the mask refuses behind those before them: [T, K] bool."""
    rows = at_prefix(model.target[:-1], drafts)
    return rows.gather(2, drafts.unsqueeze(2)).squeeze(2) == -math.inf


def cut(model: Model, drafter: Drafter) -> Drafter:
    """The draft ends before the first token that is refused."""
    return with_lengths(drafter, lambda drafts: (~refused(model, drafts)).cumprod(1).sum(1))


def zeroed(model: Model, drafter: Drafter) -> Drafter:
    """A refused token stays, and its place is said to have been drawn from nothing."""

    def report(drafts: Tensor) -> DraftRows:
        reported = drafter.report(drafts)
        assert reported.distributions is not None
        probs = reported.distributions.draft_probs
        assert probs is not None
        gone = probs.masked_fill(refused(model, drafts).unsqueeze(2), 0)
        return replace(reported, distributions=replace(reported.distributions, draft_probs=gone))

    return replace(drafter, report=report)


def variation(rule: str, model: Model, drafter: Drafter) -> float:
    problem: Problem = problem_of(model, drafter, SAMPLING["unit"], DOUBLE)
    block = rule == "block" and not drafter.coupled
    return exact_distribution(RULES[rule], replace(problem, block=block), 46).total_variation


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("drafter", ["one_hot", "dense_probs", "dense_logits", "sparse"])
@pytest.mark.parametrize("rule", RULES)
def test_refused_drafts_that_stay_leave_the_distribution_under_the_grammar_as_it_is(
    rule: str, drafter: str, seed: int
) -> None:
    model = masked_model(seed)
    assert variation(rule, model, DRAFTERS[drafter](model, DOUBLE)) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_are_drawn_under_the_mask_leave_it_as_it_is(rule: str) -> None:
    model = under_the_mask(masked_model(1))
    assert variation(rule, model, dense_probs(model, DOUBLE)) <= 1e-12


@pytest.mark.parametrize("repair", [cut, zeroed])
@pytest.mark.parametrize("rule", RULES)
def test_repairs_of_refused_drafts_are_biased(rule: str, repair: Callable[[Model, Drafter], Drafter]) -> None:
    models = [masked_model(seed) for seed in (1, 2, 3)]
    assert max(variation(rule, model, repair(model, dense_probs(model, DOUBLE))) for model in models) > 0.01
