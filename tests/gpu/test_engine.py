"""The engine on a GPU: the text of a CPU, with and without drafts, with and without graphs, and one wait per step."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpu_helpers import DRAFTERS, GREEDY, NGRAM, engine, generate, prompts, speculation

from specdec import SamplingParams
from specdec.core.runner.graphs import GraphedTarget

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=48, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def plain():
    return generate(engine())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_of_a_cpu(params):
    assert generate(engine(), params=params) == generate(engine("cpu"), params=params)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_change_no_greedy_token_and_are_accepted(name, graphs, plain):
    llm = engine(speculative_config=speculation(name), cuda_graphs=graphs)
    assert generate(llm) == plain
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 50


def test_host_drafts_change_no_greedy_token(plain):
    assert generate(engine(speculative_config=NGRAM)) == plain


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 48}, {"num_kv_blocks": 40}], ids=["chunked", "scarce"])
def test_chunks_and_preemption_change_no_greedy_token(settings, plain):
    assert generate(engine(speculative_config=NGRAM, **settings)) == plain


def test_graphs_are_on_and_change_no_greedy_token(plain):
    llm = engine()
    assert isinstance(llm.engine.parts.runner._target, GraphedTarget)
    assert generate(engine(cuda_graphs=False)) == plain


@pytest.mark.parametrize("speculative", [None, NGRAM, speculation("eagle3")], ids=["plain", "host", "device"])
def test_waits_per_decoding_step(speculative):
    """One for the outcome, one more for drafts of a device. The first steps, which check more, do not count."""
    llm = engine(speculative_config=speculative)
    for prompt in prompts(llm, 3):
        llm.engine.add_request({"prompt_token_ids": prompt}, GREEDY.replace(max_tokens=200))
    for _ in range(18):
        llm.engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                llm.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(each.message) for each in caught if "synchronizing" in str(each.message)]
    assert len(waits) <= 4 * (2 if speculative and "eagle" in str(speculative["method"]) else 1), waits


def test_the_cache_is_sized_from_what_is_left():
    small, large = (engine(gpu_memory_utilization=share, max_num_seqs=4096).engine.parts for share in (0.2, 0.6))
    assert 0 < small.scheduler.pool.num_blocks <= large.scheduler.pool.num_blocks
