"""What the engine says of parents in a draft that are no trees, or no trees that were declared."""

from __future__ import annotations

import pytest
import torch

from specdec.core.proposing.draft_check import DraftChecker
from specdec.sdk import DistributionKind, Draft, DraftDistribution, Needs, ProposerError
from specdec.sdk.errors import PluginId
from specdec.sdk.extensions import Trees
from specdec.testing.fakes import step_view

V, K, DEPTH = 8, 4, 2
PLUGIN = PluginId("mine", "x_mod:Mine", "dist-x", "0.3.1")
TREES = Needs(extensions=(Trees(),))
SPARSE = Needs(distributions=("sparse",), sparse_top_m=2, extensions=(Trees(),))


def check(draft: Draft, needs: Needs = TREES, num_requests: int = 1):
    checker = DraftChecker(PLUGIN, needs, V, torch.device("cpu"), max_depth=DEPTH)
    step = step_view([[1, 2, 3]] * num_requests, K)
    return checker.check(draft, step, [K] * num_requests)


def refused(draft: Draft, needs: Needs = TREES) -> ProposerError:
    with pytest.raises(ProposerError) as raised:
        check(draft, needs)
    return raised.value


def trees(*each: list[tuple[int, int]]) -> Draft:
    return Draft.from_trees(each, K)


def sparse(tree: list[tuple[int, int]], ids: list[list[int]], probs: list[list[float]], replacement: bool) -> Draft:
    draft = trees(tree)
    distribution = DraftDistribution(
        kind=torch.tensor([DistributionKind.SPARSE], dtype=torch.uint8),
        sparse_ids=torch.tensor([ids]),
        sparse_probs=torch.tensor([probs]),
        replacement=replacement,
    )
    return Draft(draft.token_ids, draft.lengths, distribution=distribution, parents=draft.parents)


TWO = [[5, 6], [7, 4], [-1, -1], [-1, -1]]
HALVES = [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]


def test_trees_are_reported_with_their_parents() -> None:
    checked = check(trees([(-1, 5), (0, 6), (-1, 7)], []), num_requests=2)
    assert [each.parents for each in checked.reports if each] == [[-1, 0, -1, -1], [-1] * 4]
    assert checked.lengths == [3, 0]


def test_a_draft_without_parents_is_a_chain_for_a_proposer_of_trees_too() -> None:
    assert [each.parents for each in check(Draft.from_lists([[5, 6]], K)).reports if each] == [None]


def test_parents_without_a_declaration_are_refused() -> None:
    assert refused(trees([(-1, 5)]), Needs()).code == "SD-E290"


@pytest.mark.parametrize("parent", [1, 2, -2, 99], ids=["itself", "later", "below the root", "beyond"])
def test_a_parent_that_is_no_earlier_node_is_refused(parent: int) -> None:
    error = refused(trees([(-1, 5), (parent, 6)]))
    assert (error.code, error.facts["node"], error.facts["found"]) == ("SD-E291", 1, parent)
    assert error.plugin == PLUGIN


def test_what_stands_behind_the_length_is_not_looked_at() -> None:
    draft = trees([(-1, 5)])
    assert draft.parents is not None
    draft.parents[0, 1:] = 99
    assert check(draft).lengths == [1]


def test_equal_siblings_are_refused_and_equal_cousins_are_not() -> None:
    assert refused(trees([(-1, 5), (-1, 5)])).code == "SD-E292"
    assert check(trees([(-1, 5), (-1, 6), (0, 7), (1, 7)])).lengths == [4]


def test_siblings_drawn_with_replacement_may_be_equal() -> None:
    tree = [(-1, 5), (-1, 5)]
    assert check(sparse(tree, TWO, HALVES, replacement=True), SPARSE).lengths == [2]
    assert refused(sparse(tree, TWO, HALVES, replacement=False), SPARSE).code == "SD-E292"


def test_a_tree_deeper_than_declared_is_refused() -> None:
    error = refused(trees([(-1, 5), (0, 6), (1, 7)]))
    assert (error.code, error.facts["found"]) == ("SD-E293", 3)


def test_a_node_is_checked_against_the_distribution_at_its_parent() -> None:
    tree = [(-1, 5), (-1, 6), (0, 7)]
    assert check(sparse(tree, TWO, HALVES, replacement=False), SPARSE).lengths == [3]
    assert refused(sparse([(-1, 5), (-1, 7)], TWO, HALVES, replacement=False), SPARSE).code == "SD-E206"


def test_only_places_with_children_need_a_distribution() -> None:
    off = [[0.5, 0.5], [0.5, 0.4], [0.0, 0.0], [0.0, 0.0]]
    assert check(sparse([(-1, 5), (-1, 6)], TWO, off, replacement=False), SPARSE).lengths == [2]
    assert refused(sparse([(-1, 5), (0, 7)], TWO, off, replacement=False), SPARSE).code == "SD-E205"


def test_parents_of_another_shape_are_refused() -> None:
    draft = trees([(-1, 5)])
    wrong = Draft(draft.token_ids, draft.lengths, parents=torch.zeros(1, K - 1, dtype=torch.int64))
    assert refused(wrong).code == "SD-E201"


def test_equal_siblings_without_a_distribution_are_refused_whatever_other_rows_report() -> None:
    twins = trees([(-1, 5), (-1, 5)], [(-1, 5), (-1, 5)])

    def said(second: DistributionKind) -> Draft:
        kind = torch.tensor([DistributionKind.SPARSE, second], dtype=torch.uint8)
        tables = {"sparse_ids": torch.tensor([TWO] * 2), "sparse_probs": torch.tensor([HALVES] * 2)}
        distribution = DraftDistribution(kind=kind, **tables, replacement=True)
        return Draft(twins.token_ids, twins.lengths, distribution=distribution, parents=twins.parents)

    assert check(said(DistributionKind.SPARSE), SPARSE, num_requests=2).lengths == [2, 2]
    with pytest.raises(ProposerError) as raised:
        check(said(DistributionKind.ONE_HOT), SPARSE, num_requests=2)
    assert raised.value.code == "SD-E292"
    assert "row 1" in str(raised.value.facts["request"])


@pytest.mark.parametrize(("ids", "position"), [([0, 3, V], 2), ([-1, 0], 0), ([0, 0, 7, -1, V], 3)])
def test_the_first_token_outside_the_vocabulary_is_named(ids: list[int], position: int) -> None:
    error = refused(Draft(torch.tensor([ids + [0] * (K + 1 - len(ids))])[:, :K], torch.tensor([len(ids[:K])])), Needs())
    assert error.code == "SD-E203"
    assert str(error.facts["request"]).endswith(f"draft position {position}")


def test_the_worst_of_several_wrong_distributions_is_named() -> None:
    """An entry below 0 by a half is worse than a sum that is off by a tenth."""
    needs = Needs(distributions=("sparse",), sparse_top_m=2)
    distribution = DraftDistribution(
        kind=torch.tensor([DistributionKind.SPARSE], dtype=torch.uint8),
        sparse_ids=torch.tensor([[[5, 6]] * K]),
        sparse_probs=torch.tensor([[[0.5, 0.4], [1.5, -0.5], [0.5, 0.5], [0.5, 0.5]]]),
    )
    error = refused(Draft(torch.tensor([[5, 5, 5, 5]]), torch.tensor([3]), distribution=distribution), needs)
    assert error.code == "SD-E205"
    assert "draft position 1: sum 1.0000, least entry -0.5, 0 not finite" in str(error.facts["worst"])
