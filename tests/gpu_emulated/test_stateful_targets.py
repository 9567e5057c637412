"""Targets with layers that keep a state, on a device: the text is a CPU's, and the host waits once for a step.

Steps in which requests are equal are replayed: those without drafts, and all of a request that is alone.
"""

from __future__ import annotations

import pytest
from figures import CHECKED_STEPS, expected
from serving import HYBRID_CASES, K, engine, prompt

from specdec import SamplingParams

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SCARCE = {"num_kv_blocks": 7, "max_num_batched_tokens": 16}
"""Prompts are computed in chunks, and one of three requests is preempted."""
PLAIN, NGRAM, MTP = HYBRID_CASES
MOST_LAUNCHES = 40
"""Of a step outside of what is recorded; a hybrid's pass is several hundred."""


def generate(llm):
    outputs = llm.generate([{"prompt_token_ids": prompt(llm, index)} for index in range(3)], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def with_requests(case):
    llm = engine(*case, None)
    for index in range(3):
        llm.engine.add_request(prompt(llm, index), GREEDY.replace(max_tokens=100), str(index))
    return llm


@pytest.mark.full
@pytest.mark.parametrize("case", HYBRID_CASES, ids="-".join)
def test_its_text_is_that_of_a_cpu_in_chunks_and_under_preemption(case, cuda):
    truth = generate(engine("hybrid-plain", "greedy", None, device="cpu"))
    llm = engine(*case, None, **SCARCE)
    assert generate(llm) == truth
    assert llm.engine.metrics.counts["num_preemptions"] > 0


@pytest.mark.parametrize("case", HYBRID_CASES, ids="-".join)
def test_the_host_waits_in_a_step_as_often_as_the_table_says(case, cuda):
    llm = with_requests(case)
    for _ in range(CHECKED_STEPS):
        llm.engine.step()
    for _ in range(4):
        with cuda.counting() as counts:
            llm.engine.step()
        assert {"waits": counts.waits.total()} == expected()["-".join(case)], counts.waits


@pytest.mark.full
@pytest.mark.parametrize("case", HYBRID_CASES, ids="-".join)
def test_every_step_of_a_request_alone_is_replayed_and_its_text_is_that_of_a_cpu(case, cuda):
    """Each number of accepted drafts has a recording, as their inputs are read again in the next step."""
    truth = engine("hybrid-plain", "greedy", None, device="cpu")
    llm, params = engine(*case, None), GREEDY.replace(max_tokens=60)
    request = llm.engine.get_request(llm.engine.add_request(prompt(llm, 0), params))
    llm.engine.step()
    accepted = set()
    while llm.engine.has_unfinished_requests:
        before = request.metrics.num_accepted_tokens
        with cuda.counting() as counts:
            llm.engine.step()
        accepted.add(request.metrics.num_accepted_tokens - before)
        assert counts.replays > 0
        assert counts.launches.total() <= MOST_LAUNCHES
    expected = truth.generate([{"prompt_token_ids": prompt(llm, 0)}], params)[0].outputs[0].token_ids
    assert request.output_token_ids == list(expected)
    assert accepted == {0} if case == PLAIN else {0, K} <= accepted


def test_plain_steps_of_requests_in_rows_that_lie_apart_are_replayed_with_one_upload(cuda):
    llm = with_requests(PLAIN)
    for _ in range(4):
        llm.engine.step()
    llm.engine.abort("1")
    llm.engine.step()
    with cuda.counting() as counts:
        llm.engine.step()
    assert counts.figures() | {"nodes": 0} == {"waits": 1, "uploads": 1, "launches": 5, "replays": 1, "nodes": 0}


@pytest.mark.full
def test_recording_can_be_left_out(cuda):
    recorded, unrecorded = (generate(engine(*PLAIN, None, cuda_graphs=graphs)) for graphs in (True, False))
    assert recorded == unrecorded
