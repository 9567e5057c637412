"""Targets with layers that keep a state, on a device: the text is a CPU's, and the host waits once for a step."""

from __future__ import annotations

import pytest
from figures import CHECKED_STEPS, expected
from serving import HYBRID_CASES, engine, prompt

from specdec import SamplingParams

pytestmark = pytest.mark.ci
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SCARCE = {"num_kv_blocks": 7, "max_num_batched_tokens": 16}
"""Prompts are computed in chunks, and one of three requests is preempted."""


def generate(llm):
    outputs = llm.generate([{"prompt_token_ids": prompt(llm, index)} for index in range(3)], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def with_requests(case):
    llm = engine(*case, None)
    for index in range(3):
        llm.engine.add_request(prompt(llm, index), GREEDY.replace(max_tokens=100), str(index))
    return llm


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


def test_rows_that_lie_apart_are_an_upload_and_no_wait(cuda):
    llm = with_requests(HYBRID_CASES[0])
    for _ in range(4):
        llm.engine.step()
    llm.engine.abort("1")
    llm.engine.step()
    with cuda.counting() as counts:
        llm.engine.step()
    assert counts.waits.total() == 1, counts.waits
    assert counts.uploads.total() == 2, counts.uploads
