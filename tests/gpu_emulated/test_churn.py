"""Recorded work gives what the same work gives unrecorded, whatever requests come, go and are preempted.

The emulated device replays without Python in memory that graphs really share. So an output that another replay
overwrites, or a number that was recorded and should not have been, changes tokens or what is accepted.

Each proposer in each form serves one of two orders of requests, some of them preempted. What one step asks of the
device is a golden figure: a regression shows without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from figures import expected, figures
from serving import CASES, churn, engine

FEW_BLOCKS = 6
"""Of 16 tokens: three long requests do not fit, and one is preempted."""
QUICK = 4
LONG = 40


def served(llm, num_requests, seed):
    """Whatever comes beside what, nothing is captured after the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.cuda.CUDAGraph, "capture_begin", lambda *args, **options: pytest.fail("captured in traffic")
        )
        found = churn(llm, num_requests, seed)
    assert not llm.engine.metrics.proposer_errors
    assert llm.engine.metrics.counts["num_preemptions"] > 0
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_recorded_work_gives_what_it_gives_unrecorded_for_a_long_time(case, cuda, mtp_target):
    settings, seed = {"num_kv_blocks": FEW_BLOCKS, "enable_prefix_caching": False}, 1 + CASES.index(case) % 2
    recorded, unrecorded = (
        served(engine(*case, mtp_target, cuda_graphs=graphs, **settings), LONG, seed) for graphs in (True, False)
    )
    assert recorded == unrecorded


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_decoding_step_asks_of_the_device_what_the_table_says(case, cuda, mtp_target):
    assert figures(cuda, engine(*case, mtp_target), case[1]) == expected()["-".join(case)]
