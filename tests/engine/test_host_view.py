"""A view on the host makes its tensors when they are read: of its own step, however late that is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specdec import SamplingParams
from specdec.core.proposing.host_view import HostView
from specdec.core.request.committed import Committed
from specdec.core.request.request import Request
from specdec.sdk import Phase, StepView


@pytest.fixture
def request_():
    """One with a prompt of 3, of which 2 tokens were committed in the step: a draft, and the token after it."""
    params = SamplingParams(max_tokens=9)
    request = Request("a", [5, 6, 7], params, 0, 12, frozenset(), None, row=2, generation=4)
    request.commit([8])
    request.commit([9, 10])
    request.num_computed_tokens = 5
    return request


@pytest.fixture
def view(request_):
    committed = [Committed.now(request_, 0, 3, 3, [9, 1], 1, [9, 10])]
    return HostView.of(committed, [4], 4, None, None, None)


def shown(view):
    tensors = {field.name: getattr(view, field.name) for field in dataclasses.fields(StepView)}
    kept = {field.name: getattr(view.kept, field.name) for field in dataclasses.fields(view.kept)}
    return {name: value.tolist() for name, value in (tensors | kept).items() if isinstance(value, torch.Tensor)}


FACTS = {
    "rows": [2],
    "generation": [4],
    "phase": [Phase.DECODE],
    "committed_length": [6],
    "newest_token": [10],
    "num_drafted": [2],
    "num_accepted": [1],
    "budget": [4],
    "cu_rows": [0, 2],
    "num_kept": [2],
    "kept_start": [3],
    "positions": [3, 4],
    "token_ids": [8, 9],
    "next_token_ids": [9, 10],
}


def test_it_shows_its_step(view):
    assert shown(view) == FACTS


def test_what_is_read_late_is_of_its_step_too(view, request_):
    request_.commit([11, 12])
    request_.num_computed_tokens, request_.row, request_.generation = 7, -1, 5
    assert shown(view) == FACTS


def test_a_tensor_is_made_once(view):
    assert view.budget is view.budget
    assert view.kept.positions is view.kept.positions


def test_a_copy_holds_every_field_and_its_changes(view):
    copy = dataclasses.replace(view, num_draft_tokens=2)
    assert shown(copy) == FACTS
    assert {field.name for field in dataclasses.fields(StepView)} == vars(copy).keys()


def test_what_a_view_does_not_have_is_an_attribute_error(view):
    with pytest.raises(AttributeError, match="bugdet"):
        _ = view.bugdet
    assert not hasattr(view, "draft_key")
