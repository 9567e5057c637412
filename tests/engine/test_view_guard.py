"""A write to a view is seen and named, of a large tensor by its version counter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.core.proposing.view_guard import MOST_ENTRIES, Snapshot, is_due
from specdec.sdk import HostProposer, ProposerError
from specdec.testing import step_view

LARGE = torch.zeros(2, MOST_ENTRIES, dtype=torch.int64)


@pytest.fixture
def step():
    view = step_view([[1, 2, 3], [4, 5]], num_draft_tokens=4, hidden=(torch.ones(3, 2),))
    return dataclasses.replace(view, accepted_nodes=LARGE.clone())


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda step: step.budget[1:].add_(1), "step.budget: 1 entry at [1]: 4 -> 5"),
        (lambda step: step.kept.token_ids.zero_(), "step.kept.token_ids: "),
        (lambda step: step.newest_token.numpy().fill(9), "step.newest_token: 2 entries, the first at [0]: "),
        (lambda step: step.accepted_nodes[1, -1].fill_(7), "step.accepted_nodes: written to"),
        (lambda step: step.kept.hidden[0].zero_(), "step.kept.hidden[0]: 6 entries"),
    ],
    ids=["one entry", "of the kept tokens", "through numpy", "large", "hidden states"],
)
def test_a_write_is_named(step, write, told):
    before = Snapshot(step)
    write(step)
    (change,) = before.changes()
    assert change.startswith(told)


def test_reading_changes_nothing(step):
    before = Snapshot(step)
    _ = step.newest_token + step.accepted_nodes[:, 0]
    assert before.changes() == []


def test_the_first_things_are_looked_at_and_then_one_of_many():
    assert [number for number in range(1, 600) if is_due(number)] == [*range(1, 17), 256, 512]


class WritesOnce(HostProposer):
    """Writes to its first step, and to no other."""

    has_written = False

    def propose(self, step):
        """Drafts nothing."""
        if not self.has_written and not step.dummy:
            self.has_written = True
            step.newest_token.add_(1)
        return super().propose(step)

    def draft(self, request, tokens, k):
        """Drafts nothing."""
        return []


def test_a_write_to_the_first_step_is_found():
    asked = {"method": f"{__name__}:WritesOnce", "num_speculative_tokens": 2, "on_proposer_error": "raise"}
    llm = LLM("tiny", speculative_config=asked)
    with pytest.raises(ProposerError, match="SD-E220"):
        llm.generate("x", SamplingParams(temperature=0, max_tokens=3))


class GrowsThePrompt(HostProposer):
    """Takes the prompt that it is shown for its own list of the text."""

    def on_start(self, request):
        self.text = request.prompt_token_ids

    def draft(self, request, tokens, k):
        """Drafts what the text began with."""
        self.text += [tokens[-1]]
        return self.text[:k]


def test_what_a_proposer_makes_of_the_prompt_changes_no_output():
    plain, asked = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    config = {"method": f"{__name__}:GrowsThePrompt", "num_speculative_tokens": 2, "on_proposer_error": "skip_step"}
    drafted, alone = (
        LLM("tiny", speculative_config=each, max_model_len=64).generate(plain, asked)[0] for each in (config, None)
    )
    assert drafted.prompt_token_ids == alone.prompt_token_ids
    assert drafted.outputs[0].token_ids == alone.outputs[0].token_ids
