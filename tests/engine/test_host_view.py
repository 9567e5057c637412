"""A view on the host is of its own step, however late it is read."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specdec import SamplingParams
from specdec.core.proposing.views import HOST, Computed, ViewBuilder
from specdec.core.request.request import Committed, Request, Scheduled
from specdec.sdk import Needs, Phase, StepView
from specdec.testing import fake_target_info


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
    committed = [Committed.now(Scheduled(request_, 3, 1, 2, samples=True), [9, 1], 1, [9, 10])]
    nothing = torch.zeros(0, dtype=torch.int64)
    builder = ViewBuilder(Needs(), 4, fake_target_info(), HOST)
    return builder.build(committed, [4], Computed(nothing, nothing))[0]


def shown(view):
    tensors = {field.name: getattr(view, field.name) for field in dataclasses.fields(StepView)}
    kept = {field.name: getattr(view.kept, field.name) for field in dataclasses.fields(view.kept)}
    return {name: value.tolist() for name, value in (tensors | kept).items() if isinstance(value, torch.Tensor)}


FACTS = {
    "slots": [2],
    "generation": [4],
    "phase": [Phase.DECODE],
    "committed_length": [6],
    "newest_token": [10],
    "num_drafted": [2],
    "num_accepted": [1],
    "budget": [4],
    "token_offsets": [0, 2],
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


def test_a_copy_holds_every_field_and_its_changes(view):
    copy = dataclasses.replace(view, width=2)
    assert shown(copy) == FACTS
    assert {field.name for field in dataclasses.fields(StepView)} == vars(copy).keys()


def test_it_holds_the_fields_of_the_contract_and_no_others(view):
    assert type(view) is StepView
    assert {field.name for field in dataclasses.fields(StepView)} == vars(view).keys()
