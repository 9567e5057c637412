"""Trees on a device: text and acceptance are those of a CPU, and a step asks of the device what the table says.

On a CPU a node's keys are a list of slots, and paths are walked on the host. On a device there are masks instead,
and the host waits for no path before it waits for the step's outcome.
"""

from __future__ import annotations

import pytest
from figures import expected, figures
from serving import NUM_NODES, TREE_CASES, K, churn, engine
from test_churn import FEW_BLOCKS, QUICK

from specdec import SamplingParams

pytestmark = pytest.mark.slow
FIGURED = [case for case in TREE_CASES if case[0] != "suffix"]
PENALISED = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 2}


@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("case", TREE_CASES, ids="-".join)
def test_text_and_acceptance_are_those_of_a_cpu(case, graphs, cuda):
    """Requests come and go, and one is preempted."""
    found = []
    for settings in ({"device": "cpu"}, {"cuda_graphs": graphs}):
        llm = engine(*case, None, num_kv_blocks=FEW_BLOCKS, **settings)
        found.append(churn(llm, QUICK))
        assert not llm.engine.metrics.proposer_errors
        assert llm.engine.metrics.counts["num_preemptions"] > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("case", FIGURED, ids="-".join)
def test_a_step_with_trees_asks_of_the_device_what_the_table_says(case, cuda):
    assert figures(cuda, engine(*case, None), case[1]) == expected()["-".join(case)]


def test_trees_of_the_host_are_verified_with_one_upload_one_wait_and_one_move(cuda):
    """In a recorded step, and nothing more is asked of the device than of a step with chains, but two launches."""
    llm = engine("suffix", "tree", None)
    llm.engine.add_request([5, 6, 7, 8, 5, 6, 9, 8, 5, 6] * 3, SamplingParams(max_tokens=60, ignore_eos=True))
    moves = 0
    for _ in range(30):
        with cuda.counting() as counts:
            llm.engine.step()
        asked = counts.figures() | {"nodes": 0}
        moved = sum(count for name, count in counts.launches.items() if "move_paths" in name)
        if moved:
            assert asked == {"waits": 1, "uploads": 1, "launches": asked["launches"], "replays": 1, "nodes": 0}
            assert moved == 1
            assert asked["launches"] <= 10
        moves += moved
    assert moves > 3


def test_penalties_and_logprobs_follow_each_nodes_own_path(cuda):
    prompts = [{"prompt_token_ids": prompt} for prompt in ([5, 6, 7, 8, 5, 6, 7, 9, 5, 6], [11] * 12)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, **PENALISED)
    found = [
        engine("suffix", form, None, device=device).generate(prompts, params)
        for form, device in (("tree", "cuda"), ("greedy", "cpu"))
    ]
    ids, logprobs = (
        [[getattr(each.outputs[0], name) for each in outputs] for outputs in found]
        for name in ("token_ids", "logprobs")
    )
    assert ids[0] == ids[1]
    for ours, theirs in zip(*logprobs, strict=True):
        assert [each.keys() for each in ours] == [each.keys() for each in theirs]


def test_the_table_has_one_wait_more_where_the_host_reads_a_draft_of_the_device():
    """It looks at a tree before it plans the next step; Medusa's is also grown on the host."""
    waits = {name: expected()[f"{name}-tree"]["waits"] for name, _ in FIGURED}
    assert waits == {"eagle3": 2, "medusa": 3}
    assert NUM_NODES > K
