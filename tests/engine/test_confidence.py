"""What a draft says of its own tokens: kept with the draft as it was returned."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.core.proposing.draft_check import DraftChecker
from specdec.core.proposing.draft_store import DistributionBuffers, DraftStore
from specdec.sdk import Draft, Needs, PluginId, ProposerError
from specdec.testing import step_view

PLUGIN = PluginId("confident", "confident:Confident")
K, NAN = 3, math.nan


def checked(confidence, needs=None):
    checker = DraftChecker(PLUGIN, needs or Needs(confidence=True), 64, torch.device("cpu"))
    draft = Draft.from_lists([[1, 2, 3], [4]], K)
    step = step_view([[1, 2], [3, 4]], num_draft_tokens=K)
    return checker.check(Draft(draft.token_ids, draft.lengths, confidence=confidence), step, [K, K])


def test_confidences_are_stored_with_the_draft_also_where_a_row_cannot_tell():
    draft = checked(torch.tensor([[1.0, 0.5, 0.0], [NAN, 7.0, -7.0]]))  # behind a draft's length anything may stand
    store = DraftStore(DistributionBuffers.none())
    store.put([0, 1], [1, 1], draft)
    first, second = store.take([(0, 1, K), (1, 1, K)]).reports([[], []])
    assert list(first.confidence) == [1.0, 0.5, 0.0]
    assert math.isnan(second.confidence[0])


def test_a_draft_may_come_without_what_its_proposer_declared():
    assert [each.confidence for each in checked(None).reports] == [(), ()]
    assert [each.confidence for each in checked(None, Needs()).reports] == [(), ()]


@pytest.mark.parametrize("position", range(K))
@pytest.mark.parametrize("value", [1.5, -0.5])
def test_every_confidence_of_a_draft_is_looked_at(position, value):
    confidence = torch.full((2, K), 0.5)
    confidence[0, position] = value
    with pytest.raises(ProposerError) as raised:
        checked(confidence)
    assert raised.value.code == "SD-E236"
    assert f"draft position {position}" in raised.value.facts["request"]


def test_rounding_beyond_a_probability_is_none():
    confidence = torch.tensor([[1.00009, -0.00009, 1.0], [0.0, 0.0, 0.0]])
    assert checked(confidence).lengths == [3, 1]
