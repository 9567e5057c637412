"""The functions that build, grow and draw trees of drafts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from specdec.sdk import Draft
from specdec.sdk.trees import (
    best_first,
    branches,
    depths,
    draw_siblings,
    path_to,
    rerank,
    shape_of_rates,
    tree_of_paths,
)


def test_paths_that_begin_alike_share_their_nodes() -> None:
    assert tree_of_paths([[5, 6, 7], [5, 8], [9], [5, 6]]) == [(-1, 5), (0, 6), (1, 7), (0, 8), (-1, 9)]


def test_depths_and_paths_follow_the_parents() -> None:
    parents = [-1, 0, 0, -1, 2]
    assert depths(parents) == [1, 2, 2, 1, 3]
    assert path_to(4, parents) == [0, 2, 4]
    assert path_to(-1, parents) == []


def test_branches_are_chains_of_first_children_and_hold_each_node_once() -> None:
    assert branches([-1, 0, 1, 1, 0, -1, 5]) == [[0, 1, 2], [3], [4], [5, 6]]
    assert branches(range(-1, 3)) == [[0, 1, 2, 3]]
    assert branches([]) == []


def test_a_draft_of_trees_is_padded_to_its_width() -> None:
    draft = Draft.from_trees([[(-1, 5), (0, 6)], []], 3)
    assert draft.token_ids.tolist() == [[5, 6, -1], [-1, -1, -1]]
    assert draft.parents is not None
    assert draft.parents.tolist() == [[-1, 0, -1], [-1, -1, -1]]
    assert draft.lengths.tolist() == [2, 0]


def test_a_tree_that_is_too_large_for_the_step_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens, and this step takes at most 1"):
        Draft.from_trees([[(-1, 5), (0, 6)]], 1)


def paths_of(probs: list[list[float]], max_depth: int) -> dict[tuple[int, ...], float]:
    """The product of probabilities of every path, where probs[d] are those of the tokens at depth d."""
    found = {}
    for depth in range(1, max_depth + 1):
        for path in itertools.product(*(range(len(row)) for row in probs[:depth])):
            found[path] = math.prod(probs[i][token] for i, token in enumerate(path))
    return found


def test_best_first_takes_the_most_likely_nodes_of_the_whole_tree() -> None:
    probs = [[0.6, 0.3, 0.1], [0.5, 0.45, 0.05], [0.9, 0.08, 0.02]]

    def children(depth: int):
        return ((token, p, depth + 1) for token, p in enumerate(probs[depth]))

    for size in (1, 4, 9, 39):
        tree, told = best_first(children, 0, size, 3)
        parents = [parent for parent, _ in tree]
        paths = [tuple(tree[node][1] for node in path_to(i, parents)) for i in range(len(tree))]
        every = paths_of(probs, 3)
        scores = [every[path] for path in paths]
        assert told == pytest.approx(scores)
        assert sorted(scores, reverse=True) == pytest.approx(scores)
        assert sum(scores) == pytest.approx(sum(sorted(every.values(), reverse=True)[:size]))


def test_best_first_asks_no_further_than_it_needs() -> None:
    asked = []

    def children(state: int):
        asked.append(state)
        for token in range(1000):
            assert token < 3, "the third sibling is never needed"
            yield token, 0.5 / (token + 1), state + 1

    assert len(best_first(children, 0, 3, 2)[0]) == 3
    assert asked == [0, 1, 1]


def test_reranking_keeps_ancestors_and_puts_the_best_first() -> None:
    tree = [(-1, 5), (-1, 6), (0, 7), (1, 8), (3, 9)]
    assert rerank(tree, [0.5, 0.4, 0.1, 0.3, 0.2], 4) == [(-1, 5), (-1, 6), (1, 8), (2, 9)]


def test_a_static_shape_is_deep_where_the_first_sibling_is_mostly_accepted() -> None:
    parents = [parent for parent, _ in shape_of_rates([0.73, 0.09, 0.05], 8, 8)]
    assert max(depths(parents)) >= 6
    assert shape_of_rates([0.5, 0.5], 2, 4) == [(-1, 0), (-1, 1)]


def test_siblings_are_drawn_without_replacement_from_what_is_left() -> None:
    probs = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    grid = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    pairs = torch.cartesian_prod(grid, grid)
    drawn = draw_siblings(probs.expand(len(pairs), -1), pairs)
    for first, second in itertools.permutations(range(3), 2):
        share = ((drawn[:, 0] == first) & (drawn[:, 1] == second)).double().mean()
        expected = probs[0, first] * probs[0, second] / (1 - probs[0, first])
        assert float(share) == pytest.approx(float(expected), abs=0.01)
    assert draw_siblings(torch.tensor([[1.0, 0.0]]), torch.full((1, 2), 0.5)).tolist() == [[0, -1]]
