"""Trees in engines that verify chains: which path is verified, and what the proposer is told of it."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from test_transformers import NUM_NEW_TOKENS, SHIPPED, chi_square, greedy, small_model_of_five, tail_bound

from specdec import LLM, SamplingParams
from specdec.adapters.best_path import on_best_path
from specdec.adapters.transformers import speculative
from specdec.core.host import CheckedDraft, DraftReport
from specdec.sdk import DistributionKind, DraftDistribution, ProposerError

ENGINE = f"transformers {transformers.__version__}, CPU"
five_tokens = pytest.fixture(scope="module")(small_model_of_five)
TREE = [-1, -1, 0, 0, 1, 4]  # two nodes below the first, and a longer path below the second
TOKENS = [10, 11, 12, 13, 14, 15]
ONE_HOT = DistributionKind.ONE_HOT


def tree(kind=ONE_HOT, length=6):
    return DraftReport(length, length, kind, [*TOKENS, -1], [*TREE, -1])


def path_of(report, distribution=None):
    draft, paths = on_best_path(CheckedDraft.read([report], distribution))
    assert draft.reports[0].parents is None
    assert draft.token_ids == [[TOKENS[node] for node in paths[0]]]
    return paths[0]


def test_the_first_child_of_each_place_is_verified():
    assert path_of(tree()) == [0, 2]


def test_a_cut_tree_has_the_path_of_what_is_left():
    assert path_of(tree(length=2)) == [0]
    assert path_of(tree(length=0)) == []


def test_drawn_nodes_keep_the_leftmost_path_and_its_distributions():
    kind, tables = int(DistributionKind.DENSE_PROBS), torch.eye(7)[None].repeat(2, 1, 1)
    told = DraftDistribution(kind=torch.tensor([kind, 0], dtype=torch.uint8), probs=tables, replacement=True)
    draft, paths = on_best_path(CheckedDraft.read([tree(kind), tree()], told))
    assert paths == [[0, 2], [0, 2]]
    places = draft.distribution.probs[0].argmax(dim=-1).tolist()
    assert places[:2] == [0, 1], "node 0 hangs from place 0, and node 2 from node 0, which is place 1"
    assert not draft.distribution.replacement, "a path has no siblings"


def test_chains_stay_as_they_are():
    chain = CheckedDraft.read([DraftReport(2, 2, ONE_HOT, [5, 6, -1])], None)
    assert on_best_path(chain) == (chain, [[0, 1]])


@pytest.fixture
def record(shown):
    """Note what `generate` showed."""

    def note(decoding):
        calls = [(os.getpid(), decoding.metrics.counts["proposer_propose_calls"])]
        shown(ENGINE, "drafts in trees", workers=calls)

    return note


TREES = {
    "a proposer of its own": {"method": "everywhere:TreeWitness", "num_speculative_tokens": 6},
    "suffix": SHIPPED["suffix"] | {"max_nodes": 12},
    "eagle3": SHIPPED["eagle3"] | {"max_nodes": 12},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_trees_change_no_text_in_transformers_and_a_path_of_them_is_accepted(model, prompts, record, name):
    decoding = speculative(model, TREES[name] | {"on_proposer_error": "raise"})
    for ids in prompts:
        assert torch.equal(greedy(model, ids, custom_generate=decoding), greedy(model, ids))
    accepted = decoding.metrics.acceptance.num_accepted_tokens
    assert accepted > 10
    if name == "a proposer of its own":
        assert decoding.proposer.num_accepted > 0.7 * accepted, "the last step of a request is not shown"
    record(decoding)


@pytest.mark.slow
def test_the_path_of_a_tree_accepts_what_a_chain_does_and_the_tree_itself_more(model, prompts):
    num_steps = []
    for config in (SHIPPED["eagle3"], TREES["eagle3"]):
        decoding = speculative(model, config)
        for ids in prompts:
            greedy(model, ids, custom_generate=decoding)
        num_steps.append(decoding.metrics.acceptance.num_steps)
    llm = LLM("tiny", speculative_config=TREES["eagle3"])
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS)
    llm.generate([{"prompt_token_ids": ids[0].tolist()} for ids in prompts], params)
    chain, path, whole = *num_steps, llm.engine.metrics.acceptance.num_steps
    assert chain <= path <= 1.25 * chain, "the leftmost path is the greedy chain, but for its end"
    assert whole < path


@pytest.mark.slow
@pytest.mark.parametrize(("proposer", "lossless"), [("DrawnTree", True), ("LyingTree", False)])
def test_the_path_of_a_drawn_tree_leaves_the_exact_distribution_and_a_lie_shows(five_tokens, proposer, lossless):
    config = {"method": f"adapter_proposers:{proposer}", "num_speculative_tokens": 3}
    decoding = speculative(five_tokens, config | {"draft_sample_method": "probabilistic"}, max_num_seqs=200)
    statistic, degrees = chi_square(five_tokens, decoding, 600, at_a_time=200)
    assert (statistic <= tail_bound(degrees)) == lossless


def test_what_is_no_tree_is_an_error_as_in_our_engine(model, prompts):
    config = {"method": "adapter_proposers:NoTree", "num_speculative_tokens": 2, "on_proposer_error": "raise"}
    with pytest.raises(ProposerError, match="SD-E291"):
        greedy(model, prompts[0], custom_generate=speculative(model, config))
