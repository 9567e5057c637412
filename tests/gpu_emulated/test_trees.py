"""Trees on a device: text and acceptance are those of a CPU, and a step asks of the device what the table says.

On a CPU a node's keys are a list of slots, and paths are walked on the host. On a device there are masks instead,
and the host waits for no path before it waits for the step's outcome.
"""

from __future__ import annotations

import pytest
from figures import expected, figures
from serving import NUM_NODES, TREE_CASES, TREES_OF_DEVICE, K, churn, engine, prompt
from test_churn import FEW_BLOCKS, QUICK

from specdec import SamplingParams

pytestmark = pytest.mark.slow
PENALISED = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 2}


UNRECORDED = [("suffix", "tree"), ("eagle3", "tree"), ("eagle3", "drawn"), ("medusa", "tree")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "graphs"),
    [*((case, True) for case in TREE_CASES), *((case, False) for case in UNRECORDED)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else ("unrecorded", "recorded")[value],
)
def test_text_and_acceptance_are_those_of_a_cpu(case, graphs, cuda):
    """Requests come and go, and one is preempted. See below for greedy ones beside drawn trees."""
    found = []
    for settings in ({"device": "cpu"}, {"cuda_graphs": graphs}):
        llm = engine(*case, None, num_kv_blocks=FEW_BLOCKS, enable_prefix_caching=False, **settings)
        found.append(churn(llm, QUICK, temperatures=(0.8,) if case[1] == "drawn" else (0, 0.8)))
        assert not llm.engine.metrics.proposer_errors
        assert llm.engine.metrics.counts["num_preemptions"] > 0
    assert found[0] == found[1]
    assert found[0][1][0] > 0, "drafts are accepted"


@pytest.mark.full
def test_beside_drawn_trees_greedy_requests_have_their_text(cuda):
    """A device draws theirs too, so that only the number of their steps is another one."""
    prompts = [{"prompt_token_ids": prompt(engine("plain", "greedy", None, device="cpu"), index)} for index in range(3)]
    params = [SamplingParams(temperature=each, max_tokens=16, seed=5, ignore_eos=True) for each in (0.8, 0, 0.8)]
    found = [engine("eagle3", "drawn", None, device=device).generate(prompts, params) for device in ("cuda", "cpu")]
    ours, theirs = ([list(each.outputs[0].token_ids) for each in outputs] for outputs in found)
    assert ours == theirs


@pytest.mark.parametrize("case", TREES_OF_DEVICE, ids="-".join)
def test_a_step_with_trees_asks_of_the_device_what_the_table_says(case, cuda):
    assert figures(cuda, engine(*case, None), case[1]) == expected()["-".join(case)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "waits"), [("suffix", 1), ("ngram", 1), ("token_recycling", 2)])
def test_trees_of_the_host_are_verified_with_one_upload_one_wait_and_one_move(name, waits, cuda):
    """In a recorded step, with a dozen launches beside it. What the target found likely is read with one wait more."""
    llm = engine(name, "tree", None)
    llm.engine.add_request([5, 6, 7, 8, 5, 6, 9, 8, 5, 6] * 3, SamplingParams(max_tokens=60, ignore_eos=True))
    moves = 0
    for _ in range(30):
        with cuda.counting() as counts:
            llm.engine.step()
        asked = counts.figures() | {"nodes": 0}
        moved = sum(count for name, count in counts.launches.items() if "move_paths" in name)
        if moved:
            assert asked == {"waits": waits, "uploads": 1, "launches": asked["launches"], "replays": 1, "nodes": 0}
            assert moved == 1
            assert asked["launches"] <= (14 if waits == 1 else 26)
        moves += moved
    assert moves > 3


@pytest.mark.full
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


@pytest.mark.full
def test_the_table_has_one_wait_more_than_for_chains_and_as_many_launches():
    """The host looks at a tree of the device before it plans the next step.

    The rows of a tree that survived are gathered, each of the hidden states on its own.
    """
    table = expected()
    for name, form in TREES_OF_DEVICE:
        tree, chain = table[f"{name}-{form}"], table[f"{name}-{'sparse' if form == 'drawn' else 'greedy'}"]
        assert tree["waits"] == chain["waits"] + 1
        assert tree["uploads"] == chain["uploads"]
        assert tree["replays"] == chain["replays"]
        assert tree["launches"] <= 1.25 * chain["launches"]
    assert NUM_NODES > K
