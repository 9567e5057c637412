"""The search for a static tree: the best one of its size on what was recorded, and what it gives elsewhere."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from recordings import shared
from typer.testing import CliRunner

from specdec import LLM, SamplingParams
from specdec.cli._app import build_app
from specdec.core.registry import PluginSettings
from specdec.lab.tree_search import best_tree, rank_path, search_tree, tokens_per_verification
from specdec.sdk import Refusal

PATHS = [(0, 0), (0, 1), (0,), (1, 0), (1, 0), (2,), ()]
MEDUSA = {"model": "tiny/medusa", "num_speculative_tokens": 3}


def closed(tree):
    return all(not node[:-1] or node[:-1] in tree for node in tree)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_no_tree_of_its_size_is_right_more_often(size):
    nodes = {path[:length] for path in PATHS for length in range(1, len(path) + 1)}
    trees = (set(each) for each in combinations(nodes, size) if closed(set(each)))
    best = max(tokens_per_verification(tree, PATHS) for tree in trees)
    found = best_tree(PATHS, size)
    assert tokens_per_verification(found, PATHS) == pytest.approx(best)
    assert all(closed(set(found[:count])) for count in range(size + 1)), "every beginning is a tree"


def test_a_path_ends_where_the_token_is_no_choice():
    assert rank_path([[5, 6], [7, 8], [9, 5]], [6, 7, 1]) == (1, 0)
    assert rank_path([[5, 6], [7, 8]], [6]) == (1,)
    assert rank_path([[5, 6]], [7]) == ()


@pytest.fixture(scope="module")
def found():
    return search_tree(shared().folder, MEDUSA, 12, PluginSettings())


def test_a_searched_tree_is_expected_to_beat_the_chain_on_other_requests(found):
    assert len(found["choices"]) == 12
    assert found["choices"][0] == [0]
    assert found["expected_of_tree"] > found["expected_of_chain"] > 1


def test_the_tree_that_was_found_is_drafted_and_the_text_stays(found):
    prompts, params = ["def read_lines(path):\n"], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    config = {**MEDUSA, "max_nodes": 12, "medusa_choices": found["choices"]}
    llm = LLM("tiny", speculative_config=config, max_model_len=256)
    plain = LLM("tiny", max_model_len=256)
    [ours], [theirs] = llm.generate(prompts, params), plain.generate(prompts, params)
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    counts = llm.engine.metrics.acceptance
    assert counts.num_trees == counts.num_drafts > 0
    assert counts.num_draft_tokens > 8 * counts.num_drafts


def test_the_command_prints_a_configuration(found):
    args = ["search-tree", str(shared().folder), "-sc", json.dumps(MEDUSA), "--nodes", "12"]
    result = CliRunner().invoke(build_app(), args)
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert printed == {**MEDUSA, "max_nodes": 12, "medusa_choices": found["choices"]}
    assert "expected tokens per verification" in result.stderr


def test_a_drafter_without_distributions_is_refused():
    with pytest.raises(Refusal):
        search_tree(shared().folder, {"method": "ngram", "num_speculative_tokens": 3}, 8, PluginSettings())
