"""Sampling parameters are those of the requests of this very step, whoever ran in the last one."""

from __future__ import annotations

import torch
from engine_helpers import make_llm

from specdec import SamplingParams
from specdec.core.cache.transfer import upload
from specdec.core.runner.batch import SamplingTable

NAMES = ("temperature", "top_k", "top_p", "min_p", "seed", "position")


def rows(table, requests):
    """What the table makes of its columns, and how many of these there were."""
    integers, floats = table.columns(requests)
    sent = upload(integers, torch.device("cpu"), floats)
    return table.rows(requests, sent[: len(integers)], sent[len(integers) :]), len(sent)


def assert_rows(table, requests):
    (found, _), (expected, _) = rows(table, requests), rows(SamplingTable(), requests)
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert (found.all_greedy, found.any_filter) == (expected.all_greedy, expected.any_filter)


def test_rows_follow_the_requests_and_their_positions():
    engine = make_llm().engine
    params = [SamplingParams(temperature=0), SamplingParams(top_k=5, seed=3), SamplingParams(top_p=0.5, min_p=0.1)]
    requests = [engine.get_request(engine.add_request([1, 2, 3 + i], each)) for i, each in enumerate(params)]
    engine.step()  # gives them rows
    found, _ = rows(SamplingTable(), requests)
    assert found.top_k.tolist() == [0, 5, 0]
    assert found.top_p.tolist() == [1, 1, 0.5]
    assert found.seed[1] == 3
    table = SamplingTable()
    for running in (requests[:1], requests[:1], requests, requests[::-1], requests[:2], requests[1:], requests[1:]):
        assert_rows(table, running)
        for request in running:
            request.token_ids.append(7)
        assert_rows(table, running)


def test_parameters_are_not_sent_again_while_the_same_requests_run():
    engine = make_llm().engine
    requests = [engine.get_request(engine.add_request([1, 2, 3]))]
    engine.step()
    table = SamplingTable()
    first, num_first = rows(table, requests)
    second, num_second = rows(table, requests)
    assert (num_first, num_second) == (len(NAMES), 1)
    assert second.seed is first.seed
    assert second.position is not first.position


def test_a_step_that_was_interrupted_before_they_arrived_leaves_nothing_behind():
    engine = make_llm().engine
    requests = [engine.get_request(engine.add_request([1, 2, 3]))]
    engine.step()
    table = SamplingTable()
    table.columns(requests)
    assert_rows(table, requests)


def test_a_request_without_a_filter_is_not_filtered_and_any_filter_counts():
    engine = make_llm().engine
    asked = [SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)]
    requests = [engine.get_request(engine.add_request([1, 2, 3], each)) for each in asked]
    assert [rows(SamplingTable(), [each])[0].any_filter for each in requests] == [False, True, True, True]
    assert rows(SamplingTable(), requests)[0].any_filter
