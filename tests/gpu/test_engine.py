"""The engine on a GPU: the text of a CPU, with and without drafts, with and without graphs, and one wait per step."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpu_helpers import DRAFTERS, GREEDY, NGRAM, engine, generate, prompts, speculation
from inside import pool_of, served_target_of

from specdec import LLM, SamplingParams
from specdec.core.cache.transfer import upload
from specdec.core.kernels.cuda.capture import CudaCapturer
from specdec.core.kernels.cuda.graphs import GraphedTarget

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
    assert isinstance(served_target_of(llm), GraphedTarget)
    assert generate(engine(cuda_graphs=False)) == plain


PLAIN_AND_DRAFTED = {"plain": None, "host": NGRAM} | {name: speculation(name) for name in DRAFTERS}


def waits_of(llm: LLM, params: SamplingParams, num_steps: int = 4) -> list[str]:
    """What torch says of waits in some decoding steps. The first steps, which check more, do not count."""
    for prompt in prompts(llm, 3):
        llm.engine.add_request({"prompt_token_ids": prompt}, params.replace(max_tokens=200))
    for _ in range(18):
        llm.engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which itself warns
        try:
            for _ in range(num_steps):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(each.message) for each in caught if "synchronizing" in str(each.message)]


@pytest.mark.parametrize("name", PLAIN_AND_DRAFTED)
def test_a_decoding_step_waits_once(name):
    waits = waits_of(engine(speculative_config=PLAIN_AND_DRAFTED[name]), GREEDY)
    assert len(waits) <= 4, waits


@pytest.mark.parametrize("distribution", ["sparse", "dense"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_with_distributions_are_accepted_and_nobody_waits_for_them(name, distribution):
    probabilistic = {"draft_sample_method": "probabilistic", "proposer_config": {"draft_distribution": distribution}}
    llm = engine(speculative_config=speculation(name) | probabilistic)
    waits = waits_of(llm, SAMPLED)
    assert len(waits) <= 4, waits
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 10
    assert not llm.engine.metrics.proposer_errors


@pytest.mark.parametrize("name", DRAFTERS)
def test_passes_of_drafters_are_captured_at_the_start(name, caplog, monkeypatch):
    captured = []
    capture = CudaCapturer.capture
    monkeypatch.setattr(CudaCapturer, "capture", lambda self, work: captured.append(work) or capture(self, work))
    with caplog.at_level("WARNING", "specdec"):
        llm = engine(speculative_config=speculation(name))
        num_at_the_start = len(captured)
        generate(llm, 3)
    assert "cannot be captured" not in caplog.text
    assert len(captured) == num_at_the_start > len(served_target_of(llm)._captured_passes)


def test_what_is_sent_begins_where_kernels_want_it():
    sent = upload([[1, 2, 3], [], [4], [5, 6]], torch.device("cuda"))
    assert [each.tolist() for each in sent] == [[1, 2, 3], [], [4], [5, 6]]
    assert all(each.data_ptr() % 16 == 0 for each in sent)


def test_the_cache_is_sized_from_what_is_left():
    small, large = (pool_of(engine(gpu_memory_utilization=share, max_num_seqs=4096)) for share in (0.2, 0.6))
    assert 0 < small.num_blocks <= large.num_blocks
