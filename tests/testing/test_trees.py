"""The kit checks proposers of trees as it checks those of chains."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from specdec.sdk import Draft, Needs, ProposerConfig, StepView
from specdec.sdk.extensions import Trees
from specdec.sdk.trees import best_first
from specdec.testing import check_proposer
from specdec.testing.scripted import some_path


class Branches:
    """What followed the newest token in the text, and what followed that."""

    needs = Needs(history=True, extensions=(Trees(),))

    def __init__(self, config: ProposerConfig) -> None:
        pass

    def propose(self, step: StepView) -> Draft:
        assert step.history is not None
        facts = enumerate(step.budget.tolist())
        trees = [self.tree(step.history.token_ids(b), budget) for b, budget in facts]
        return Draft.from_trees(trees, step.width)

    def tree(self, tokens: list[int], budget: int) -> list[tuple[int, int]]:
        followers: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for token, following in pairwise(tokens):
            followers[token][following] += 1

        def children(token: int):
            total = followers[token].total()
            return ((each, count / total, each) for each, count in followers[token].most_common())

        tree, _ = best_first(children, tokens[-1], budget, 3)
        return tree


class Twins(Branches):
    def tree(self, tokens: list[int], budget: int) -> list[tuple[int, int]]:
        return [(-1, 5), (-1, 5)][:budget]


class Deep(Branches):
    def tree(self, tokens: list[int], budget: int) -> list[tuple[int, int]]:
        return [(node - 1, 5) for node in range(budget)]


class TakesEveryNodeForAccepted(Branches):
    """Counts the tokens of a request by the nodes it drafted."""

    needs = Needs(history=True, state="per_request", extensions=(Trees(),))

    def __init__(self, config: ProposerConfig) -> None:
        self.met: Counter[str] = Counter()

    def propose(self, step: StepView) -> Draft:
        for name, drafted in zip(step.request_ids, step.num_drafted.tolist(), strict=True):
            self.met[name] += drafted
        wanted = zip(step.request_ids, step.budget.tolist(), strict=True)
        trees = [[(-1, 5 + self.met[name] % 7)][:budget] for name, budget in wanted]
        return Draft.from_trees(trees, step.width)


def test_a_good_proposer_of_trees_passes() -> None:
    results = check_proposer(Branches, {"num_speculative_tokens": 3, "max_nodes": 8})
    assert [each.text for each in results if not each.ok] == []
    assert sum(each.status == "passed" for each in results) > 20


@pytest.mark.parametrize(
    ("mutant", "check", "code"),
    [
        (Twins, "draft_form", "SD-E292"),
        (Deep, "draft_form", "SD-E293"),
        (TakesEveryNodeForAccepted, "any_schedule", ""),
    ],
)
def test_a_fault_in_trees_is_seen(mutant: type, check: str, code: str) -> None:
    (result,) = check_proposer(mutant, {"num_speculative_tokens": 3, "max_nodes": 8}, only=[check])
    assert not result.ok
    assert code in result.text


def test_scripted_paths_go_through_later_siblings_too() -> None:
    assert some_path([-1, -1, 1, 1, 2]) == [1, 2, 4]
    assert some_path([]) == []
