"""LayerSkip: the target drafts with its first layers."""

from __future__ import annotations

import pytest

from specdec import LLM, SamplingParams
from specdec.sdk import Refusal

METHOD = "specdec.plugins.layer_skip.proposer:LayerSkipProposer"
PROMPTS = ["def read_lines(path):\n", "class Stack:\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def llm_with(k=3, **options):
    config = {"method": METHOD, "num_speculative_tokens": k, "proposer_config": options}
    return LLM("tiny", speculative_config=config, max_model_len=256)


def texts(llm, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain():
    return texts(LLM("tiny", max_model_len=256))


@pytest.mark.parametrize(("exit_layer", "fewest"), [(6, 1.8), (None, 1.0)])
def test_text_is_plain_decodings_and_late_exits_are_accepted(plain, exit_layer, fewest):
    llm = llm_with(exit_layer=exit_layer)
    assert texts(llm) == plain
    assert llm.engine.metrics.acceptance.mean_acceptance_length >= fewest
    llm.engine.check_integrity()


def test_sampled_drafts_are_verified_with_their_distribution():
    params = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
    config = {"method": METHOD, "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    llm = LLM("tiny", speculative_config=config | {"proposer_config": {"exit_layer": 6}}, max_model_len=256)
    texts(llm, params)
    assert llm.engine.metrics.acceptance.draft_acceptance_rate > 0.3


def test_the_last_layer_is_no_exit():
    with pytest.raises(Refusal, match="exit_layer is 8"):
        llm_with(exit_layer=8)
