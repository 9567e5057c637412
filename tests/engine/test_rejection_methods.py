"""`rejection_sample_method`: the rules reach the step, and those that are lossy say so."""

from __future__ import annotations

import logging

import pytest
from engine_helpers import GREEDY, counter

from specdec import LLM, SamplingParams
from specdec.sdk import ConfigError

SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
DRAFTER = {"model": "tiny/draft", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}


def run(prompts, params, **settings):
    llm = LLM("tiny", speculative_config=DRAFTER | settings, max_model_len=128)
    outputs = llm.generate([{"prompt_token_ids": prompt[:40]} for prompt in prompts[:3]], params)
    drafted, accepted = (counter(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    return [output.outputs[0].token_ids for output in outputs], accepted / drafted


@pytest.mark.slow
@pytest.mark.parametrize("method", ["block", "typical"])
def test_greedy_requests_are_verified_exactly_by_every_rule(method, prompts):
    assert run(prompts, GREEDY, rejection_sample_method=method)[0] == run(prompts, GREEDY)[0]


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_synthetic_acceptance_is_what_was_asked_for(rate, prompts, caplog):
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": rate}
    assert run(prompts, SAMPLED, **synthetic)[1] == rate
    assert "SD-W302" in caplog.text


def test_block_verification_accepts_as_much_as_standard_and_warns_of_nothing(prompts, caplog):
    with caplog.at_level(logging.WARNING):
        block = run(prompts, SAMPLED, rejection_sample_method="block")
    assert block[1] > 0
    assert "SD-W302" not in caplog.text


def test_a_rule_that_nobody_offers_is_told_with_those_there_are():
    known = r"(?s)SD-E132 there is no such verification rule.*mean +standard.*standard, block, synthetic, typical"
    with pytest.raises(ConfigError, match=known):
        LLM("tiny", speculative_config=DRAFTER | {"rejection_sample_method": "stndard"})
