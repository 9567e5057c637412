"""Every packaged drafter under `enable_adaptive_verification`: the text stays, and rows that stop are run no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from inside import proposer_of
from packaged_drafters import DRAFTERS
from sweeps import slow_unless

from specdec import LLM, SamplingParams
from specdec.sdk import Draft, StepView

PROMPTS = [[5, 7, 9], [*range(3, 32)], [11, 12] * 8, [40, 41, 42, 43] * 3]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
K = 3


def started(target: str, **settings: Any) -> LLM:
    return LLM(target, max_model_len=128, **settings)


def texts(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


@cache
def plain(target: str) -> list[list[int]]:
    return texts(started(target))


def adaptive(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"num_speculative_tokens": K, "enable_adaptive_verification": True}


@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_the_plain_one(name, target, tmp_path):
    asked = DRAFTERS[name](tmp_path, target)
    llm = started(asked.target, speculative_config=adaptive(asked.speculative))
    assert texts(llm) == plain(asked.target)
    assert llm.engine.metrics.acceptance.num_drafts > 0
    llm.engine.check_integrity()


class Stops:
    """Ends about every third row after each token."""

    def goes_on(self, confidence: Sequence[float]) -> bool:
        return bool(int(confidence[-1] * 4096) % 3)


TOKEN_BY_TOKEN = [
    *("eagle", "eagle3", "draft_model", "intersection", "EAGLE-3 with latent attention", "mtp", "mtp, three modules"),
    *("hydra", "mlp_speculator", "layer_skip", "gemma4_assistant"),
]


@pytest.mark.parametrize("name", slow_unless("layer_skip", TOKEN_BY_TOKEN))
def test_drafts_that_stop_begin_like_whole_ones(name, target, tmp_path, monkeypatch):
    asked = DRAFTERS[name](tmp_path, target)
    llm = started(asked.target, speculative_config=adaptive(asked.speculative))
    proposer, lengths = proposer_of(llm), set()
    propose = proposer.propose

    def twice(step: StepView) -> Draft:
        whole, cut = (propose(replace(step, stop_rule=rule)) for rule in (None, Stops()))
        for b, (length, cut_length) in enumerate(zip(whole.lengths.tolist(), cut.lengths.tolist(), strict=True)):
            assert cut.token_ids[b, :cut_length].tolist() == whole.token_ids[b, :cut_length].tolist()
            told = cut.confidence[b, :cut_length].tolist()
            ends = [not Stops().goes_on(told[: i + 1]) for i in range(cut_length)]
            assert cut_length == ([*ends[: length - 1], True].index(True) + 1 if length else 0)
            lengths.add((length, cut_length))
        return whole

    monkeypatch.setattr(proposer, "propose", twice)
    assert texts(llm) == plain(asked.target)
    assert {(K, 1), (K, 2), (K, K)} <= lengths
