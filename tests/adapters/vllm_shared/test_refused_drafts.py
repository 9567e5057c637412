"""What vLLM's scheduler keeps of drafts under a grammar, by the tokens that it is asked about."""

from __future__ import annotations

from itertools import takewhile
from types import SimpleNamespace

import pytest

from specdec.adapters.vllm_shared import refused_drafts

REQUESTS = {"a": "text", "b": "text"}


def validate(manager, request, spec_tokens):
    """As vLLM's own, of a grammar that allows even tokens."""
    return list(takewhile(lambda token_id: token_id >= 0 and token_id % 2 == 0, spec_tokens))


def fill(manager, requests, request_ids, drafts):
    """The drafts that vLLM would walk its grammars along."""
    return drafts


def manager_of(additional):
    return SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional))


OURS = manager_of({refused_drafts.KEY: True})


@pytest.mark.parametrize(
    ("draft", "kept"),
    [([2, 3, 5], [2, 3]), ([3], [3]), ([2, 4], [2, 4]), ([2, -1], [2]), ([2, 4, -1, -1], [2, 4]), ([], [])],
)
def test_the_first_refused_token_stays_and_what_fills_up_does_not(draft, kept):
    assert refused_drafts.keeping(validate, OURS, "text", draft) == kept


def test_the_mask_of_a_refused_token_is_that_of_a_place_without_a_draft():
    drafts = {"a": [2, 3], "b": [4, 6], "no grammar": [1]}
    masked = refused_drafts.without_refused(validate, fill, OURS, REQUESTS, ["a", "b", "no drafts"], drafts)
    assert masked == {"a": [2, -1], "b": [4, 6], "no grammar": [1]}
    assert drafts["a"] == [2, 3], "what is verified"


@pytest.mark.parametrize("additional", [{}, {"specdec": {}}, object()], ids=["none", "ours", "another's"])
def test_other_configurations_are_left_alone(additional):
    manager, drafts = manager_of(additional), {"a": [3]}
    assert refused_drafts.keeping(validate, manager, "text", [2, 3]) == [2]
    assert refused_drafts.without_refused(validate, fill, manager, REQUESTS, ["a"], drafts) is drafts
