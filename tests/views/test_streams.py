"""What proposers are told and shown is what it was when the contract was published, in every scenario."""

from __future__ import annotations

import copy

import pytest

from .streams import SCENARIOS, differences, recorded, stream


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_stream_is_the_recorded_one(name):
    found = list(differences(recorded(name), stream(name)))
    assert found == [], "\n".join(found)


def test_the_scenarios_show_what_their_names_say():
    for name in ("preempt", "many_requests"):
        assert "on_preempt" in {entry["call"] for entry in recorded(name)}
    [finished] = [entry for entry in recorded("stop_in_mid_draft") if entry["call"] == "on_finish"]
    [end] = finished["end"].values()
    assert (end["reason"], len(end["output_token_ids"])) == ("stop", 6)
    shown = [entry["kept.kept_start"] for entry in recorded("cached_prefix") if entry["call"] == "observe"]
    assert {"cached": 6, "first": 9} in shown
    assert len({name for entry in recorded("several_outputs") for name in entry.get("requests", {})}) == 3


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("budget", "a"), "call 2 (observe): budget of a was"),
        (("kept.hidden[1]", "b"), "call 2 (observe): kept.hidden[1] of b was"),
        (("requests", "a", "slot"), "call 2 (observe): requests of a was"),
        (("width",), "call 2 (observe): width was 3, is None"),
    ],
)
def test_a_difference_names_step_field_and_request(place, said):
    before = recorded("hidden_states")
    now = copy.deepcopy(before)
    *above, last = place
    part = now[2]
    for name in above:
        part = part[name]
    del part[last]
    [line] = differences(before, now)
    assert line.startswith(said)


def test_a_field_that_came_later_is_no_difference():
    before = recorded("reject")
    now = [entry | {"later": {"a": 1}} for entry in before]
    assert list(differences(before, now)) == []
