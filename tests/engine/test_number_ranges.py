"""Every number that a user may write: within its range it generates, outside it is refused before anything runs."""

from __future__ import annotations

import math

import pytest
import torch
from engine_helpers import GREEDY, make_llm

from specdec import SamplingParams
from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.engine.memory import free_memory
from specdec.lab.run import BenchSettings
from specdec.sdk import ConfigError, ProposerConfig

LARGEST, HUGE = 2**63 - 1, 10**400
EXTREMES = {
    "temperature": [1e-45, 1e-40, 1e-30, 1e6],
    "top_k": [-1, 2**31 - 1],
    "top_p": [1e-30, 1 - 1e-12],
    "min_p": [1e-300, 1.0],
    "seed": [-(2**63), LARGEST],
    "max_tokens": [LARGEST],
    "repetition_penalty": [1e-3, 1e3],
    "frequency_penalty": [-2.0, 2.0],
    "presence_penalty": [-2.0, 2.0],
    "logit_bias": [{5: 1e4}, {5: -1e4}],
    "num_speculative_tokens": [0, LARGEST],
}
BEYOND = {
    "temperature": [1e7, 1e308, math.inf, math.nan, -1e-9],
    "top_k": [2**31, 2**63, HUGE, -2],
    "top_p": [0.0, 1e-300, 1.1, math.nan],
    "min_p": [-1e-9, 1.1, math.nan],
    "seed": [2**63, HUGE, -(2**63) - 1],
    "max_tokens": [0, 2**63, HUGE],
    "min_tokens": [-1, 2**63],
    "stop_token_ids": [[2**31], [HUGE], [-1]],
    "repetition_penalty": [0.0, 1e-9, 1e9, math.inf],
    "frequency_penalty": [2.1, math.nan],
    "presence_penalty": [-2.1, HUGE],
    "logit_bias": [{5: 1e5}, {5: math.nan}, {5: HUGE}],
    "logprobs": [-1, 21, HUGE],
    "n": [0, 10**6, HUGE],
    "num_speculative_tokens": [-1, 2**63],
}


@pytest.fixture(scope="module")
def llm():
    return make_llm("ngram", max_model_len=128)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EXTREMES.items() for value in values])
def test_the_largest_and_smallest_numbers_generate_and_harm_nobody(name, value, llm, prompts, truth):
    odd = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": 7, name: value})
    batch = [{"prompt_token_ids": prompts[3]}, {"prompt_token_ids": prompts[4]}]
    other, found = llm.generate(batch, [GREEDY.replace(max_tokens=8), odd])
    assert list(other.outputs[0].token_ids) == truth[3][:8]
    assert len(found.outputs[0].token_ids) == min(odd.max_tokens, 128 - len(prompts[4]))
    assert llm.get_metrics()
    assert not llm.engine.metrics.counts["bad_logits_rows"]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BEYOND.items() for value in values])
def test_a_number_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"(?s)SD-E132.*{name}"):
        SamplingParams(**{"max_tokens": 2**62, name: value})


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        (EngineConfig, "max_model_len", 2**31),
        (EngineConfig, "max_num_seqs", 2**31),
        (EngineConfig, "max_num_batched_tokens", 10**12),
        (EngineConfig, "block_size", HUGE),
        (EngineConfig, "num_kv_blocks", 0),
        (EngineConfig, "kv_cache_memory_gib", 1e308),
        (EngineConfig, "seed", 2**63),
        (EngineConfig, "gpu_memory_utilization", 1.01),
        (SpeculativeConfig, "num_speculative_tokens", 10**12),
        (SpeculativeConfig, "num_speculative_tokens", 1025),
        (SpeculativeConfig, "synthetic_acceptance_rate", -0.1),
        (ProposerConfig, "num_draft_tokens", 10**12),
        (EngineConfig, "num_threads", 100_000),
        (BenchSettings, "temperature", 1e308),
        (BenchSettings, "output_len", 2**63),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(model, name, value):
    required = {
        EngineConfig: {"model": "tiny"},
        SpeculativeConfig: {"method": "ngram"},
        BenchSettings: {"engine": EngineConfig(model="tiny")},
    }
    with pytest.raises(ConfigError, match=rf"(?s)SD-E132.*{name}"):
        model(**required.get(model, {}), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("max_num_seqs", 10**9), ("num_kv_blocks", 10**9), ("kv_cache_memory_gib", 2.0**20)]
)
def test_what_takes_more_memory_than_there_is_is_refused_with_both_numbers(name, value, target_path):
    settings = {"max_num_seqs": 10**6} if name == "kv_cache_memory_gib" else {}
    with pytest.raises(ConfigError, match=rf"(?s)SD-E178.*{name}.*needed +\d+ bytes.*available +\d+ bytes"):
        make_llm(**settings, **{name: value})


def test_many_places_for_requests_are_served(prompts, truth):
    assert free_memory(torch.device("cpu")) > 2**30
    llm = make_llm(max_num_seqs=10**5)
    (output,) = llm.generate([{"prompt_token_ids": prompts[3]}], GREEDY.replace(max_tokens=4))
    assert list(output.outputs[0].token_ids) == truth[3][:4]


def test_seeds_of_several_outputs_go_round_at_the_largest(llm, prompts):
    prompt = {"prompt_token_ids": prompts[3]}
    params = SamplingParams(seed=LARGEST, n=2, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    (second,) = llm.generate([prompt], params.replace(seed=-(2**63), n=1))
    assert output.outputs[1].token_ids == second.outputs[0].token_ids
