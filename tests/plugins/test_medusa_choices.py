"""Medusa's static trees: each node is the choice that its path of ranks names, from the checkpoint or from the user."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from inside import proposer_of
from plugin_helpers import TINY

from specdec import LLM, SamplingParams
from specdec.plugins.medusa.choices import Choices
from specdec.sdk import Refusal
from specdec.sdk.model_proposer import DraftVocabulary
from specdec.testing import check_proposer

PATHS = [[0], [0, 0], [1], [0, 1], [1, 0], [0, 0, 2]]


def test_each_node_is_the_choice_of_its_head_and_rank():
    tree = Choices.of(PATHS, 6, 3, 8)
    assert tree.parents.tolist() == [-1, 0, -1, 0, 2, 1]
    logits = torch.zeros(1, 3, 8)
    logits[0, 0, [5, 6]] = torch.tensor([2.0, 1.0])
    logits[0, 1, [3, 4]] = torch.tensor([2.0, 1.0])
    logits[0, 2, [7, 1, 2]] = torch.tensor([3.0, 2.0, 1.0])
    tokens, parents = tree.tree(logits, 6, None)
    assert tokens.tolist() == [[5, 3, 6, 4, 3, 2]]
    assert parents.tolist() == [tree.parents.tolist()]
    mapped, _ = tree.tree(logits, 6, DraftVocabulary.from_ids(torch.arange(10, 18), 64))
    assert mapped.tolist() == [[15, 13, 16, 14, 13, 12]]


def test_a_step_that_takes_fewer_nodes_gets_the_first_ones():
    settings = {"model": "tiny/medusa", "num_speculative_tokens": 3, "max_nodes": 6, "medusa_choices": PATHS}
    assert all(each.ok for each in check_proposer("medusa", settings, only=["every_k", "budgets"]))


def test_a_smaller_or_shallower_tree_is_the_beginning_of_the_list():
    assert Choices.of(PATHS, 3, 3, 8).parents.tolist() == [-1, 0, -1]
    assert Choices.of(PATHS, 6, 1, 8).ranks.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0], [1, 0]], r"\[1, 0\] and no \[1\] before it"),
        ([[0], [0]], r"\[0\] twice"),
        ([[8]], "out of range"),
        ([[0, 0, 0, 0]], r"no \[0, 0, 0\] before it"),
    ],
)
def test_paths_that_are_no_tree_are_refused_by_name(paths, words):
    with pytest.raises(Refusal, match=words):
        Choices.of(paths, 4, 3, 8)


def made(model="tiny/medusa", **more):
    return LLM("tiny", speculative_config={"model": model, "num_speculative_tokens": 3, **more}, max_model_len=128)


def test_choices_without_nodes_are_refused():
    with pytest.raises(Refusal, match="medusa_choices without max_nodes"):
        made(medusa_choices=PATHS)


def test_the_checkpoints_own_choices_are_drafted(tmp_path):
    folder = shutil.copytree(TINY / "medusa", tmp_path / "medusa")
    config = json.loads((folder / "config.json").read_text()) | {"medusa_choices": PATHS}
    (folder / "config.json").write_text(json.dumps(config))
    llm = made(str(folder), max_nodes=16)
    assert proposer_of(llm)._choices.parents.tolist() == [-1, 0, -1, 0, 2, 1]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [found] = llm.generate(["class Stack:\n"], params)
    [plain] = LLM("tiny", max_model_len=128).generate(["class Stack:\n"], params)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.engine.metrics.acceptance.num_draft_tokens <= 6 * llm.engine.metrics.acceptance.num_drafts
    assert proposer_of(made(str(folder)))._choices is None, "chains are the default"
