"""Drawn trees: each node by its own uniform from what is reported, where its shape and nothing else put it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.sdk.model_proposer import DraftSampler
from specdec.sdk.model_proposer.drawn_nodes import DrawnNodes, DrawnShape, widths_of
from specdec.sdk.model_proposer.greedy_tree import Candidates
from specdec.sdk.trees import depths
from specdec.sdk.types import DistributionKind, Draft, StepView

from .test_draft_sampler import step_of

V, DEPTH, K = 12, 4, 10
ROWS = 40
ROOT = torch.tensor(5.0)


class Given:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    def uniform(self, draft_index: int) -> Tensor:
        return self.table[:, draft_index]


def a_step(uniforms: Tensor, budgets: list[int] | None = None, **parameters: float) -> StepView:
    step = step_of([{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **parameters}] * len(uniforms))
    budget = torch.tensor(budgets or [K] * len(uniforms))
    return replace(step, random=Given(uniforms), width=K, budget=budget)


def state_of(states: Tensor, tokens: Tensor) -> Tensor:
    return (states * 31 + tokens + 1) % 997


def logits_of(states: Tensor) -> Tensor:
    """[..., V] of states [...]: a network that knows the whole path."""
    return 2 * torch.sin(states[..., None] * torch.linspace(0.1, 3, V))


def grown(step: StepView, form: str = "sparse") -> Draft:
    sampler = DraftSampler(step, None, form, sparse_top_m=V)
    shape = DrawnShape.of(K, DEPTH, step.budget.device)
    nodes = DrawnNodes(sampler.rule, shape, sampler.budgets, *sampler.numbers(K))
    known = ROOT.expand(len(step), 1)
    nodes.add(logits_of(known), None)
    for _ in range(nodes.depth - 1):
        level = nodes.next_level()
        states = state_of(known.gather(1, level.above + 1), level.token_ids)
        known = torch.cat([known, states], dim=1)
        nodes.add(logits_of(states), level)
    return sampler.draft_of_trees(*nodes.result())


def uniforms(seed: int = 0, rows: int = ROWS) -> Tensor:
    return torch.rand(rows, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trees(draft: Draft) -> list[list[tuple[int, int]]]:
    columns = draft.parents.tolist(), draft.token_ids.tolist(), draft.lengths.tolist()
    return [list(zip(parents[:n], ids[:n], strict=True)) for parents, ids, n in zip(*columns, strict=True)]


@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}], ids=str)
def test_each_node_is_drawn_by_its_uniform_from_what_earlier_siblings_leave(form: str, parameters: dict) -> None:
    drawn_with = uniforms()
    draft = grown(a_step(drawn_with, **parameters), form)
    for row, tree in enumerate(trees(draft)):
        taken: dict[int, list[int]] = {}
        for node, (parent, token) in enumerate(tree):
            probs = reported(draft, row, parent + 1)
            ids = probs.argsort(descending=True, stable=True)
            probs[taken.get(parent, [])] = 0
            mass = probs[ids].double().cumsum(0)
            at = int((mass <= drawn_with[row, node] * mass[-1]).sum())
            assert int(ids[at]) == token
            taken.setdefault(parent, []).append(token)


def reported(draft: Draft, row: int, place: int) -> Tensor:
    """[V]."""
    said = draft.distribution
    if int(said.kind[row]) == DistributionKind.DENSE_LOGITS:
        return said.logits[row, place].softmax(0)
    assert int(said.kind[row]) == DistributionKind.SPARSE
    ids, probs = said.sparse_ids[row, place], said.sparse_probs[row, place]
    return torch.zeros(V).index_add(0, ids[ids >= 0], probs[ids >= 0])


def test_what_is_reported_at_a_place_is_the_networks_distribution_after_its_path() -> None:
    draft = grown(a_step(uniforms(1)))
    for row, tree in enumerate(trees(draft)):
        states = [ROOT]
        for parent, token in tree:
            states.append(state_of(states[parent + 1], torch.tensor(token)))
        for place in {parent + 1 for parent, _ in tree}:
            assert torch.allclose(reported(draft, row, place), logits_of(states[place]).softmax(0), atol=1e-6)


def test_a_tree_has_the_best_shape_of_its_budget() -> None:
    budgets = [n % (K + 1) for n in range(ROWS)]
    for budget, tree in zip(budgets, trees(grown(a_step(uniforms(2), budgets))), strict=True):
        assert len(tree) == budget
        counts = Counter(depths([parent for parent, _ in tree]))
        assert (
            tuple(counts[depth + 1] for depth in range(len(widths_of(K, DEPTH)[budget]))) == widths_of(K, DEPTH)[budget]
        )
        assert len(set(tree)) == len(tree)


def test_where_a_node_hangs_depends_on_nodes_before_it_alone() -> None:
    """This is what makes verification exact: neither its own number nor later ones have an influence."""
    first = uniforms(3)
    shape = trees(grown(a_step(first, top_p=0.6)))
    for node in range(K):
        changed = first.clone()
        changed[:, node:] = uniforms(4 + node)[:, node:]
        for one, other in zip(shape, trees(grown(a_step(changed, top_p=0.6))), strict=True):
            assert one[:node] == other[:node]
            assert [parent for parent, _ in one[: node + 1]] == [parent for parent, _ in other[: node + 1]]


def test_places_with_few_entries_leave_their_nodes_to_others_or_to_none() -> None:
    for tree in trees(grown(a_step(uniforms(5), top_k=1))):
        assert [parent for parent, _ in tree] == list(range(-1, DEPTH - 1))
    for tree in trees(grown(a_step(uniforms(6), top_k=2))):
        assert max(Counter(parent for parent, _ in tree).values()) == 2
        assert len(tree) == K


def test_no_tree_depends_on_the_rest_of_its_batch() -> None:
    table, budgets = uniforms(7), [1 + n % K for n in range(ROWS)]
    together = trees(grown(a_step(table, budgets)))
    for row in (0, 3, 9):
        assert trees(grown(a_step(table[row : row + 1], budgets[row : row + 1]))) == [together[row]]


def test_greedy_rows_take_the_likeliest_siblings_and_are_one_hot() -> None:
    step = a_step(uniforms(8, rows=2))
    sampling = replace(step.sampling, temperature=torch.tensor([0.0, 1.0]))
    draft = grown(replace(step, sampling=sampling))
    assert draft.distribution.kind.tolist() == [DistributionKind.ONE_HOT, DistributionKind.SPARSE]
    root = [token for parent, token in trees(draft)[0] if parent == -1]
    assert root == logits_of(ROOT).argsort(descending=True)[: len(root)].tolist()


def likeliest(num_nodes: int) -> tuple[Tensor, ...]:
    found, known = Candidates(None, num_nodes, DEPTH), ROOT.expand(ROWS, 1) + torch.arange(ROWS)[:, None]
    found.add(logits_of(known), None)
    for _ in range(found.depth - 1):
        level = found.next_level()
        states = state_of(known.gather(1, level.above + 1), level.token_ids)
        known = torch.cat([known, states], dim=1)
        found.add(logits_of(states), level)
    return found.result()


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
def test_a_smaller_tree_of_likeliest_nodes_is_the_beginning_of_a_larger_one(num_nodes: int) -> None:
    """Though fewer nodes are run for it."""
    for small, large in zip(likeliest(num_nodes), likeliest(24), strict=True):
        torch.testing.assert_close(small, large[:, :num_nodes])
