"""LayerSkip: the target drafts with its first layers, and a search finds how many."""

from __future__ import annotations

import pytest
import torch
from inside import proposer_of

from specdec import LLM, SamplingParams
from specdec.plugins.layer_skip.search import best_exit, candidates, expected_speedup
from specdec.sdk import Refusal
from specdec.testing import fake_target_info

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


def test_every_start_finds_the_same_exit():
    found = {next(n for n, each in skip._exits.items() if each is skip._layers) for skip in (searched(), searched())}
    assert len(found) == 1


def searched():
    return proposer_of(llm_with())


def test_the_last_layer_is_no_exit():
    with pytest.raises(Refusal, match="exit_layer is 8"):
        llm_with(exit_layer=8)


@pytest.mark.parametrize(
    ("num_layers", "found"), [(2, [1]), (1, [1]), (8, [1, 2, 3, 4, 5, 6, 7]), (32, list(range(4, 32, 4)))]
)
def test_candidates_are_spread_over_the_layers(num_layers, found):
    assert candidates(num_layers) == found


def test_the_best_exit_weighs_agreement_against_cost():
    """Of a target that always writes the token after the last one: exits agree in a known share of places."""
    info = fake_target_info(num_layers=8)

    def agreeing(places):
        def logits(token_ids, start):
            position = start + torch.arange(len(token_ids))
            right = (token_ids + 1 + (position % 4 >= places)) % info.vocab_size
            return torch.nn.functional.one_hot(right, info.vocab_size) * 50.0

        return logits

    found = best_exit({2: agreeing(1), 4: agreeing(3), 7: agreeing(4)}, agreeing(4), info, 2)
    assert (found.num_layers, found.agreement) == (4, 0.75)
    assert found.speedup == expected_speedup(0.75, 0.5, 2) == pytest.approx((1 + 0.75 + 0.5625) / 2)
