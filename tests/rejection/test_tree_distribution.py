"""The exact output distribution of both forms of the verifier of trees: over three tokens, all trees of depth and width
two, which lie beside each other in one ragged batch.

In float64 it is within 1e-12 of the target's distribution, in float32 and through the interpreted kernels within 2e-7.
The slice of the kernels has the walk of one-hot trees and both rules of drawn ones. Where a drafter draws two of the
three tokens, there are few trees, and each shape still meets every branch of the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.helpers.sweeps import covering, pairs

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.rejection import DistributionKind, sampler
from specdec.testing.rejection.reference import Params
from specdec.testing.rejection.tree_reference import TreeRule, coupled, traversal

from .interpreted import Verify, each_row_once, quiet, with_tile
from .test_trees import DRAWN, PARAMS, RULES, VERIFIERS
from .tree_boxes import DOUBLE, INTERPRETED, SINGLE, Drawn, TreeProblem, variation_through
from .tree_problems import SHAPES, Model, V, grown, likeliest, of_shape

pytestmark = quiet
DOUBLE_TOLERANCE = 1e-12
SINGLE_TOLERANCE = 2e-7
FILTERED = [name for name in PARAMS if name != "greedy"]  # a greedy request has no wall to search for
ALL = SHAPES[1:]
FEW = [[-1, -1], [-1, 0, 0]]  # two nodes below one place at either depth; all shapes take hours in an interpreter


def drawn_problem(
    rule: TreeRule,
    kind: DistributionKind,
    name: str = "unit",
    *,
    shapes: Sequence[Sequence[int]] = ALL,
    tokens: int = 2,
    replacement: bool = False,
    dtype: torch.dtype = torch.float32,
) -> TreeProblem:
    """tokens: how many a drafter draws from. A drafter for each of the shapes."""
    target, draft = Model(20, PARAMS[name], dtype), Model(21, Params(top_k=tokens), dtype)
    trees = [
        Drawn(number, *each)
        for number, shape in enumerate(shapes)
        for each in grown(draft, of_shape(shape), replacement=replacement)
    ]
    return TreeProblem(rule, trees, target, draft, kind, replacement)


def one_hot_problem(name: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> TreeProblem:
    target, draft = Model(20, PARAMS[name], dtype), Model(21)
    trees = [Drawn(number, *likeliest(draft, shape)) for number, shape in enumerate(shapes)]
    return TreeProblem(coupled, trees, target, draft, DistributionKind.ONE_HOT)


@pytest.mark.parametrize(("rule", "kind", "name"), covering([*RULES.values()], DRAWN, FILTERED))
def test_drawn_trees_leave_the_distribution_as_it_is(rule: TreeRule, kind: DistributionKind, name: str) -> None:
    verify = getattr(sampler, VERIFIERS[rule])
    assert variation_through(verify, drawn_problem(rule, kind, name), SINGLE) <= SINGLE_TOLERANCE
    in_double = drawn_problem(rule, kind, name, dtype=torch.float64)
    assert variation_through(verify, in_double, DOUBLE) <= DOUBLE_TOLERANCE


@pytest.mark.parametrize("name", FILTERED)
def test_one_hot_trees_leave_the_distribution_as_it_is(name: str) -> None:
    assert variation_through(sampler.verify, one_hot_problem(name, ALL), SINGLE) <= SINGLE_TOLERANCE
    in_double = one_hot_problem(name, ALL, torch.float64)
    assert variation_through(sampler.verify, in_double, DOUBLE) <= DOUBLE_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(("rule", "name", "replacement"), pairs([*RULES.values()], ["unit", "top_k"], [False, True]))
def test_drafters_of_all_three_tokens_are_lossless_too(rule: TreeRule, name: str, *, replacement: bool) -> None:
    verify, kind = getattr(sampler, VERIFIERS[rule]), DistributionKind.SPARSE
    problem = drawn_problem(rule, kind, name, tokens=V, replacement=replacement)
    assert variation_through(verify, problem, SINGLE) <= SINGLE_TOLERANCE
    problem = drawn_problem(rule, kind, name, tokens=V, replacement=replacement, dtype=torch.float64)
    assert variation_through(verify, problem, DOUBLE) <= DOUBLE_TOLERANCE


def kernel(rule: TreeRule) -> Verify:
    return with_tile(4, partial(triton_backend.verify, together=rule is traversal))


def through_kernels(problem: TreeProblem) -> float:
    with each_row_once():
        return variation_through(kernel(problem.rule), problem, INTERPRETED)


@pytest.mark.slow
def test_the_kernels_walk_of_one_hot_trees_leaves_the_distribution_as_it_is() -> None:
    assert through_kernels(one_hot_problem("unit", [[-1, -1, 0]])) <= SINGLE_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_kernels_of_drawn_trees_leave_the_distribution_as_it_is(rule: TreeRule) -> None:
    assert through_kernels(drawn_problem(rule, DistributionKind.SPARSE, shapes=[[-1, -1]])) <= SINGLE_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("name", ["unit", "top_k"])
def test_the_kernels_walk_of_every_one_hot_tree_leaves_the_distribution_as_it_is(name: str) -> None:
    assert through_kernels(one_hot_problem(name, ALL)) <= SINGLE_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_kernels_of_drafters_of_all_three_tokens_leave_the_distribution_as_it_is(rule: TreeRule) -> None:
    problem = drawn_problem(rule, DistributionKind.SPARSE, shapes=FEW[:1], tokens=V)
    assert through_kernels(problem) <= SINGLE_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", DRAWN, ids=lambda kind: kind.name)
def test_the_kernels_of_every_kind_leave_the_distribution_as_it_is(rule: TreeRule, kind: DistributionKind) -> None:
    assert through_kernels(drawn_problem(rule, kind, "cold", shapes=FEW)) <= SINGLE_TOLERANCE
    assert through_kernels(drawn_problem(rule, kind, "top_k", shapes=FEW[:1])) <= SINGLE_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_kernels_of_siblings_drawn_with_replacement_leave_the_distribution_as_it_is(rule: TreeRule) -> None:
    problem = drawn_problem(rule, DistributionKind.DENSE_PROBS, shapes=FEW, replacement=True)
    assert through_kernels(problem) <= SINGLE_TOLERANCE
