"""Whose state lies where, and what is read again: books of rows, without any model."""

from __future__ import annotations

import pytest
import torch

from specdec.core.cache.state_store import StateLayout, StateStore, StateTensor
from specdec.core.request.request import Request, Scheduled
from specdec.sdk.errors import IntegrityError

LAYOUT = StateLayout((StateTensor("recurrent", 0, (2, 3), torch.float32),), 5, torch.float32)


def share(row=0, generation=1, start=0, first=0, num_committed=4, num_drafts=0):
    request = Request.stand_in(64, row, generation, [])
    return Scheduled(request, start, num_committed, num_drafts, samples=True, first_token=first)


@pytest.fixture
def store():
    return StateStore([LAYOUT], num_rows=4, num_drafts=3, device=torch.device("cpu"))


def passed(store, *shares):
    planned = store.plan(shares)
    with store.passing(planned):
        pass
    return planned


def test_a_row_takes_its_state_and_the_inputs_of_its_drafts():
    assert LAYOUT.bytes_per_row(num_drafts=3) == 4 * (2 * 3 + 3 * 5)


@pytest.mark.parametrize("num_accepted", range(4))
def test_inputs_of_accepted_drafts_are_read_again(store, num_accepted):
    passed(store, share(num_drafts=3))
    planned = passed(store, share(start=4 + num_accepted, num_committed=1))
    assert [member.num_reread for member in planned.kept[0].members] == [num_accepted]
    assert planned.kept[0].length == num_accepted + 1
    assert not planned.kept[0].is_fresh


@pytest.mark.parametrize("start", [3, 8])
def test_no_request_goes_on_before_its_state_or_beyond_its_drafts(store, start):
    passed(store, share(num_drafts=3))
    assert not store.fits(0, 1, start)
    with pytest.raises(IntegrityError, match="SD-E264"):
        store.plan([share(start=start)])


def test_the_next_owner_of_a_row_begins_anew(store):
    passed(store, share())
    assert store.fits(0, 1, 4)
    assert not store.fits(0, 2, 4)
    assert passed(store, share(generation=2)).kept[0].is_fresh


def test_after_an_interrupted_pass_nobody_goes_on(store):
    passed(store, share())
    with pytest.raises(KeyboardInterrupt), store.passing(store.plan([share(start=4, num_committed=1)])):
        raise KeyboardInterrupt
    assert not store.fits(0, 1, 4)
    assert not store.fits(0, 1, 5)
    assert store.fits(0, 1, 0)


def test_requests_of_equal_lengths_are_computed_together_in_the_order_of_rows(store):
    planned = store.plan([share(3, first=0), share(0, first=4), share(1, first=8, num_committed=2), share(2, first=10)])
    rows = [[member.row for member in group.members] for group in planned.kept]
    assert rows == [[1], [0, 2, 3]]
    assert isinstance(planned.kept[0].rows, slice)
    assert planned.kept[1].rows.tolist() == [0, 2, 3]
    assert planned.order == (3, 1, 0, 2)  # pieces by place in the batch: rows 3, 0, 1, 2


def test_drafts_are_a_group_of_their_own(store):
    planned = store.plan([share(0, num_drafts=2), share(1, first=6, num_drafts=2), share(2, first=12)])
    assert [group.length for group in planned.kept] == [4]
    assert [group.length for group in planned.drafts] == [2]
    assert planned.drafts[0].rows == slice(0, 2)
    assert [member.first for member in planned.drafts[0].members] == [4, 10]


@pytest.mark.parametrize(
    ("changes", "even"),
    [
        ({}, (1, 2)),
        ({"num_drafts": 1}, None),
        ({"start": 4}, None),
        ({"start": 4, "num_committed": 2}, None),
        ({"start": 0, "num_committed": 1, "generation": 2}, None),
    ],
    ids=["equal", "other drafts", "fewer accepted", "other tokens", "begins"],
)
def test_a_pass_is_even_where_every_request_reads_and_drafts_as_much(changes, even, store):
    passed(store, share(0, num_drafts=3), share(2, first=7, num_drafts=3))
    both = {"start": 5, "num_committed": 1, "num_drafts": 2}
    planned = store.plan([share(0, **both), share(2, first=3, **both | changes)])
    assert planned.even == even


def test_a_pass_with_two_new_tokens_of_each_is_not_even(store):
    passed(store, share(0, num_drafts=3), share(2, first=7, num_drafts=3))
    both = {"start": 4, "num_committed": 2, "num_drafts": 2}
    assert store.plan([share(0, **both), share(2, first=4, **both)]).even is None


def test_inputs_that_are_read_again_are_not_computed_as_new_ones_are(store):
    """Two tokens of the first request go through at once, as do two inputs of the second: one accepted, one new."""
    passed(store, share(0), share(1, first=4, num_drafts=3))
    planned = store.plan([share(0, start=4, num_committed=2), share(1, first=2, start=5, num_committed=1)])
    assert [(group.length, group.decodes) for group in planned.kept] == [(2, False), (2, True)]
    assert [member.row for group in planned.kept for member in group.members] == [0, 1]
