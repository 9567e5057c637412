"""Drafts under a grammar: a refused one stays and is rejected. Two repairs that others make are biased, and seen.

Of chains and of trees. The slice of the interpreted kernels has the walk of one-hot trees and both rules of drawn ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.core.rejection import DistributionKind, DraftRows, sampler, verify, verify_block
from specdec.testing.rejection.exact_distribution import Problem, exact_distribution
from specdec.testing.rejection.reference import Params
from specdec.testing.rejection.tree_reference import TreeRule, coupled, left_of

from . import tree_problems
from .interpreted import quiet
from .problems import DRAFTERS, SAMPLING, Drafter, Model, at_prefix, dense_probs, problem_of, random_model, with_lengths
from .test_tree_distribution import ALL, kernel
from .test_trees import DRAWN, VERIFIERS
from .test_trees import RULES as TREE_RULES
from .tree_boxes import DOUBLE as IN_DOUBLE
from .tree_boxes import INTERPRETED, Drawn, TreeProblem, variation_through
from .tree_problems import Masked, Sketch, grown, likeliest, of_shape

pytestmark = quiet
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


def masked_trees(
    rule: TreeRule, kind: DistributionKind, shapes: Sequence[Sequence[int]] = ALL, dtype: torch.dtype = DOUBLE
) -> TreeProblem:
    """Trees of a drafter for each shape: its likeliest tokens where they are one-hot, else all that it may draw."""
    target, draft = Masked(30, dtype=dtype), tree_problems.Model(31, Params(top_k=2), dtype)
    one_hot = kind == DistributionKind.ONE_HOT
    trees = [
        Drawn(number, *each)
        for number, shape in enumerate(shapes)
        for each in ([likeliest(draft, shape)] if one_hot else grown(draft, of_shape(shape)))
    ]
    assert any(has_refused(each.sketch, target) for each in trees)
    return TreeProblem(rule, trees, target, draft, kind)


def has_refused(sketch: Sketch, target: Masked) -> bool:
    nodes = zip(sketch.parents, sketch.token_ids, strict=True)
    return any(not target(sketch.prefix(parent + 1))[token] for parent, token in nodes)


TREES = [(coupled, DistributionKind.ONE_HOT), *((rule, kind) for rule in TREE_RULES.values() for kind in DRAWN)]


@pytest.mark.parametrize(("rule", "kind"), TREES)
def test_refused_nodes_that_stay_leave_the_distribution_under_the_grammar_as_it_is(
    rule: TreeRule, kind: DistributionKind
) -> None:
    problem = masked_trees(rule, kind)
    assert variation_through(getattr(sampler, VERIFIERS[rule]), problem, IN_DOUBLE) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("rule", [coupled, *TREE_RULES.values()], ids=["coupled", *TREE_RULES])
def test_the_kernels_of_trees_leave_it_as_it_is(rule: TreeRule) -> None:
    kind = DistributionKind.ONE_HOT if rule is coupled else DistributionKind.SPARSE
    problem = masked_trees(rule, kind, [[-1, -1, 0]] if rule is coupled else [[-1, -1]], torch.float32)
    assert variation_through(kernel(rule), problem, INTERPRETED) <= 2e-7


def without_refused(sketch: Sketch, target: Masked, draft: tree_problems.Model) -> Sketch:
    """A refused node goes, with what is below it. Others are reported as if it had not been drawn."""
    kept, places = Sketch(), {0: 0}
    for node, (parent, token) in enumerate(zip(sketch.parents, sketch.token_ids, strict=True)):
        place = places.get(parent + 1)
        if place is not None and target(kept.prefix(place))[token]:
            kept = kept.with_node(place, token, left_of(draft(kept.prefix(place)), kept.siblings(place)))
            places[node + 1] = len(kept.token_ids)
    return kept


def with_zeroed(sketch: Sketch, target: Masked, draft: tree_problems.Model) -> Sketch:
    """A refused node stays, and is said to have been drawn from nothing."""
    allowed = [
        target(sketch.prefix(parent + 1))[token] > 0
        for parent, token in zip(sketch.parents, sketch.token_ids, strict=True)
    ]
    return replace(sketch, q=[q * stays for q, stays in zip(sketch.q, allowed, strict=True)])


@pytest.mark.parametrize("repair", [without_refused, with_zeroed])
@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES)
def test_repairs_of_refused_nodes_are_biased(rule: TreeRule, repair: Callable[..., Sketch]) -> None:
    found = []
    for seed in (1, 2, 3):
        target, draft = Masked(10 * seed), tree_problems.Model(10 * seed + 1)
        drawn = [(repair(sketch, target, draft), prob) for sketch, prob in grown(draft, of_shape([-1, -1, 0]))]
        found.append(tree_problems.variation(rule, iter(drawn), target))
    assert max(found) > 0.01
