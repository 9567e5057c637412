"""What a step costs: the table never falls, and prompts of every length are measured."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import Quiet, settings

from specdec.core.registry import PluginSettings
from specdec.lab.recording import Cost, Recording
from specdec.lab.recording.cost import measured_groups
from specdec.lab.recording.monotone import end_slope, pooled
from specdec.lab.recording.recorder import record

SECONDS = st.floats(1e-6, 10.0)


@given(st.lists(SECONDS, min_size=1, max_size=12))
def test_pooled_values_never_fall_and_keep_their_sum(values):
    found = pooled(values, [1.0] * len(values))
    assert list(found) == sorted(found)
    assert sum(found) == pytest.approx(sum(values))


def test_a_value_that_was_measured_often_moves_less():
    assert pooled([3.0, 1.0], [3.0, 1.0]) == (2.5, 2.5)
    assert pooled([1.0, 2.0, 2.0, 5.0], [1.0] * 4) == (1.0, 2.0, 2.0, 5.0)


def test_the_slope_past_the_end_is_that_of_many_points():
    assert end_slope([1, 2, 4, 8], [9.0, 9.0, 9.0, 13.0]) == pytest.approx(1.0)  # the upper half alone
    assert end_slope([1], [3.0]) == 0


def test_the_table_of_a_busy_machine_predicts_no_negative_time():
    """The last two points fall: their slope would lead to -4.3 s for a prompt of 1354 tokens."""
    cost = Cost(rows=(1, 2, 3, 5, 9, 17, 85, 89), seconds=(0.011, 0.012, 0.012, 0.013, 0.016, 0.024, 0.1261, 0.112))
    assert cost.step_seconds(1354) > cost.step_seconds(89) > 0
    assert cost.step_seconds(1354) == pytest.approx(1.7, rel=0.3)  # about 1.3 ms a row, as from 17 to 89


@given(st.dictionaries(st.integers(1, 2000), SECONDS, min_size=1, max_size=12))
def test_more_rows_never_take_less_time(table):
    rows = tuple(sorted(table))
    cost = Cost(rows=rows, seconds=tuple(table[each] for each in rows))
    found = [cost.step_seconds(each) for each in sorted((*range(1, 40), *rows, 2001, 4000))]
    assert min(found) > 0
    assert all(after >= before * (1 - 1e-12) for before, after in pairwise(found))


def test_groups_are_spread_over_all_lengths():
    prompts = [[0] * length for length in (5, 80, 7, 1354, 9, 30, 200, 600, 11)]
    assert [len(group[0]) for group in measured_groups(prompts, 1)] == [5, 9, 11, 80, 200, 1354]
    lengths = [[len(each) for each in group] for group in measured_groups(prompts, 3)]
    assert (lengths[0], lengths[-1]) == ([5, 7, 9], [200, 600, 1354])
    assert measured_groups([[1], [2, 3]], 4) == [[[1], [2, 3]]]
    assert measured_groups([[2, 3], [1]], 1) == [[[1]], [[2, 3]]]


@pytest.mark.slow
def test_a_recording_measures_its_longest_prompt(tmp_path):
    asked = settings(measure_cost=True, max_num_seqs=1, num_prompts=8, output_len=2)
    record(asked, PluginSettings(), tmp_path / "x", Quiet())
    recording = Recording.open(tmp_path / "x")
    cost = recording.manifest.cost
    assert cost.rows[-1] >= max(len(each.prompt_token_ids) for each in recording)
    assert {1, 2, 3, 5, 9, 17} <= set(cost.rows)
    assert list(cost.seconds) == sorted(cost.seconds)
