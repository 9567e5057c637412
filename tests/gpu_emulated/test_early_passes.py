"""On a device, a pass over the target's layers that begins too early harms no text, and its proposer is named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from figures import CHECKED_STEPS
from serving import K, prompt

from specdec import LLM, SamplingParams
from specdec.core.proposing.target_access import EarlyPasses
from specdec.sdk import ProposerError
from specdec.sdk.extensions import TargetLayers
from specdec.sdk.model_proposer import CachedTargetProposer

LAYERS = (0, 1, 2)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class InTime(CachedTargetProposer):
    """Drafts with the target's first layers, from the newest token on."""

    too_early = 0

    @classmethod
    def needs(cls, config, target):
        run = TargetLayers(layers=LAYERS, lookahead=config.num_draft_tokens)
        return cls.shared_needs(config, target, run)

    def build(self):
        self.layers = self.services.target_layers(LAYERS)

    def advance(self, index, rows, lengths, token_ids, *states):
        places = torch.arange(len(rows) + 1, device=rows.device)
        return (self.layers.logits(token_ids, rows, lengths + index - self.too_early, places, places[:-1]),)


class Early(InTime):
    """Its first two passes write over what the target computed."""

    too_early = 2


def engine(name: str | None, policy: str = "raise") -> LLM:
    config = {"method": f"test_early_passes:{name}", "num_speculative_tokens": K, "on_proposer_error": policy}
    settings = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 3}
    return LLM("tiny", speculative_config=config if name else None, **settings)


def texts(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt(llm, index)} for index in range(3)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


@pytest.mark.full
def test_it_is_refused_by_name_with_the_next_step(cuda):
    with pytest.raises(ProposerError, match=r"(?s)SD-E276.*Early.*next_position.*2 positions before in row 0"):
        texts(engine("Early"))


@pytest.mark.full
def test_the_text_is_the_plain_one_where_steps_are_skipped(cuda):
    llm = engine("Early", "skip_step")
    assert texts(llm) == texts(engine(None))
    assert llm.engine.metrics.proposer_errors["SD-E276"] > 1


@pytest.mark.full
def test_looking_waits_for_nothing(cuda):
    llm = engine("InTime")
    for index in range(3):
        llm.engine.add_request(prompt(llm, index), GREEDY.replace(max_tokens=100))
    for _ in range(CHECKED_STEPS):
        llm.engine.step()
    with cuda.counting() as counts:
        llm.engine.step()
    found = counts.figures()
    assert (found["waits"], found["replays"]) == (1, 2)
    assert not llm.engine.metrics.proposer_errors


@pytest.mark.parametrize("early", [1, 5])
def test_positions_that_a_pass_began_too_early_are_counted_for_the_next_step_and_four_rows_are_named(early):
    passes = EarlyPasses(6, torch.device("cpu"))
    passes.require_none()
    passes.begin(SimpleNamespace(slots=torch.arange(6), kept=SimpleNamespace(next_position=torch.full((6,), 10))))
    starts = torch.tensor([9] * early + [12] * (6 - early))
    assert passes.behind(torch.arange(6), starts).tolist() == [10] * early + [12] * (6 - early)
    passes.end()
    with pytest.raises(ProposerError, match="SD-E276") as raised:
        passes.require_none()
    named = ", ".join(f"1 positions before in row {row}" for row in range(min(early, 4)))
    assert raised.value.facts["found"] == named
