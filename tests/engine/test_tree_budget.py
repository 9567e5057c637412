"""How many nodes of trees are verified: the first ones of each, by the worth of their paths."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from engine_helpers import GREEDY, counter, tokens
from inside import budget_of as budget_in

from specdec import LLM
from specdec.core.proposing.calibration import RATE
from specdec.core.request.metrics import EngineMetrics
from specdec.core.request.verified_tree import VerifiedTree
from specdec.core.runner.tree_budget import Place, TreeBudget, places_of

from .test_draft_budget import Running, Told, Verified

K, NAN = 6, math.nan
TREE = [-1, -1, 0, 0, 1, 2]


class VerifiedNodes(Verified):
    """A step's tree, by its accepted nodes."""

    def __init__(self, request, num_drafted, nodes):
        super().__init__(request, num_drafted, len(nodes))
        self.tree = VerifiedTree(nodes, TREE[:num_drafted])

    @property
    def accepted_nodes(self):
        return self.tree.nodes


def budget_of(confidences, parents, *, row_cost=0.1):
    running = [Running(row) for row in range(len(confidences))]
    budget = TreeBudget(K, running, Told(confidences, parents), EngineMetrics("target", "proposer"))
    for rows in (1, 8, 64):
        budget._target.record(rows, 1.0 + row_cost * rows)
        budget._draft.record(rows, 0.0)
    budget._num_steps = 2 * K + 2  # nothing is tried out any more
    return budget, running


def planned(confidences, parents, **costs):
    budget, running = budget_of(confidences, parents, **costs)
    lengths = budget.plan(lambda request: len(confidences[request.row]))
    return [lengths(request) for request in running]


def test_a_node_is_worth_the_chances_on_its_path():
    """The same confidences in a row of four: as a tree, the nodes behind the unlikely sibling are worth theirs."""
    told = [0.85, 0.05, 0.95, 0.95]
    budget, running = budget_of([told, told], [[-1, -1, 0, 2], None])
    budget.plan(lambda request: 4)
    tree, chain = (budget._worths(each) for each in running)
    assert tree[1] == tree[2] == tree[3] == pytest.approx(0.05), "no more than the node before it"
    assert chain[1] == pytest.approx(0.85 * 0.05)
    assert chain[3] < 0.05


def test_the_likeliest_nodes_of_all_requests_are_verified():
    told = [[0.95, 0.95, 0.25, 0.05], [0.15, 0.05], [0.95, 0.95, 0.95]]
    assert planned(told, [[-1, 0, -1, 2], [-1, -1], None], row_cost=0.3) == [2, 0, 3]
    assert planned(told, [[-1, 0, -1, 2], [-1, -1], None], row_cost=0.0) == [4, 2, 3]
    assert planned(told, [[-1, 0, -1, 2], [-1, -1], None], row_cost=1000.0) == [0, 0, 0]


def test_a_node_is_verified_whatever_it_and_those_after_it_turn_out_to_be():
    """What makes it lossless for drawn trees: a confidence at i may depend on the nodes before i, and on no other."""
    rng = random.Random(1)
    for _ in range(300):
        sizes = [rng.randint(0, K) for _ in range(4)]
        parents = [[rng.randint(-1, node - 1) for node in range(size)] for size in sizes]
        confidences = [[rng.random() for _ in range(size)] for size in sizes]
        row_cost = rng.choice([0.02, 0.1, 0.3, 1.0])
        before = planned(confidences, parents, row_cost=row_cost)
        for b, each in enumerate(confidences):
            for i in range(len(each)):
                other = [*each[: i + 1], *(rng.random() for _ in each[i + 1 :])]
                hung = [*parents[b][: i + 1], *(rng.randint(-1, node - 1) for node in range(i + 1, len(each)))]
                changed = [*confidences[:b], other, *confidences[b + 1 :]]
                after = planned(changed, [*parents[:b], hung, *parents[b + 1 :]], row_cost=row_cost)
                assert (before[b] > i) == (after[b] > i)


def test_where_a_proposer_cannot_tell_nodes_of_the_same_depth_and_rank_count():
    budget, (request,) = budget_of([[NAN] * K], [TREE])
    assert list(places_of(TREE)) == [
        Place(-1, 1, 0), Place(-1, 1, 1), Place(0, 2, 0), Place(0, 2, 1), Place(1, 2, 0), Place(2, 3, 0),
    ]  # fmt: skip
    for _ in range(200):
        budget.plan(lambda request: K)
        budget.learn([VerifiedNodes(request, K, [1])], 1.0, 0.0)
    budget.plan(lambda request: K)
    first, second, below, other, met, beyond = budget._confidences[request]
    assert first < 0.1 < 0.9 < second
    assert (below, met) == (pytest.approx(below), pytest.approx(below)), "of one depth and rank"
    assert met < 0.1, "the nodes behind the accepted one were rejected"
    assert (other, beyond) == (pytest.approx((1 - RATE) / 2), RATE), "nothing was seen of nodes behind rejected ones"
    assert not budget._recent


def test_a_chain_beside_trees_is_a_tree_without_siblings():
    budget, (chain,) = budget_of([[0.95, 0.85, 0.75]], None)
    budget.plan(lambda request: 3)
    assert all(above >= below for above, below in pairwise(budget._worths(chain)))
    budget.learn([Verified(chain, 3, 2)], 1.0, 0.0)
    assert [each.accepted for each in budget.calibration.bins if each.count] == [0, 1, 1]


SETTINGS = {
    "eagle3": {"model": "tiny/eagle3", "num_speculative_tokens": 4, "num_draft_nodes": 10},
    "dflash": {"model": "tiny/dflash", "num_speculative_tokens": 4, "num_draft_nodes": 8},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "num_draft_nodes": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_the_plain_one_and_nodes_are_left_out(name, prompts):
    asked, params = [{"prompt_token_ids": each} for each in prompts[:6]], GREEDY.replace(max_tokens=40)
    plain = tokens(LLM("tiny", max_num_seqs=6, max_model_len=512).generate(asked, params))
    config = SETTINGS[name] | {"enable_adaptive_verification": True}
    llm = LLM("tiny", speculative_config=config, max_num_seqs=6, max_model_len=512)
    assert tokens(llm.generate(asked, params)) == plain
    assert counter(llm, "num_unverified_draft_tokens") > 0
    assert sum(each.count for each in budget_in(llm).calibration.bins) > 0
