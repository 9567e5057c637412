"""Draft networks that draw under the grammars of requests: nothing that is refused is drafted, the text stays."""

from __future__ import annotations

import pytest
from engine_helpers import counter

from specdec import LLM, SamplingParams
from specdec.core.engine.assembly import parts_of
from specdec.core.request.grammar import RequestGrammar
from specdec.sdk import Refusal, hookimpl
from specdec.sdk.structured_outputs import StructuredOutputs, Vocabulary

ASKED = {"json": {"type": "object", "properties": {"n": {"enum": [1, 22]}, "s": {"enum": ["ab", "b"]}}}}
K = {"num_speculative_tokens": 3}
NETWORKS = {
    "draft": {"method": "draft_model", "model": "tiny/draft", **K},
    "eagle3": {"method": "eagle3", "model": "tiny/eagle3", **K},
    "pard": {"method": "draft_model", "model": "tiny/pard", **K},
    "medusa": {"method": "medusa", "model": "tiny/medusa", **K},
    "dflash": {"method": "dflash", "model": "tiny/dflash", **K},
    "dspark": {"method": "dspark", "model": "tiny/dspark", **K},
}
PROMPTS = ["def main(", "import os\n", "class A:\n    ", "x = "]


class Refused:
    """Counts drafts that the grammar of their request refuses, by grammars of its own."""

    def __init__(self, llm):
        parts = parts_of(llm.engine)
        self.count, self._grammars, self._vocab_size = 0, parts.grammars, parts.plan.info.vocab_size
        self._vocabulary = Vocabulary(parts.model.tokenizer, parts.plan.info.vocab_size, parts.model.eos_token_ids)
        self._followed = {}

    @hookimpl
    def on_verified(self, step):
        for each in step.requests:
            if self._grammars.of(each.request_id) is not None:
                self._follow(each)

    def _follow(self, each):
        if each.request_id not in self._followed:
            started = self._grammars.backend.compile(StructuredOutputs(**ASKED)).start()
            self._followed[each.request_id] = RequestGrammar(started, self._vocabulary)
        grammar, rejected = self._followed[each.request_id], each.draft_token_ids[each.num_accepted :]
        for place, token_id in enumerate(each.token_ids):
            if place == each.num_accepted and rejected:
                self.count += not bool(grammar.allowed([], self._vocab_size)[rejected[0]])
            assert grammar.accept(token_id)


def outputs(config, *, temperature=0.0, count_refused=False):
    params = [
        SamplingParams(seed=seed, temperature=temperature, max_tokens=40, structured_outputs=ASKED)
        for seed in range(len(PROMPTS))
    ]
    params[-1] = params[-1].replace(structured_outputs=None)
    with LLM("tiny", speculative_config=config, max_model_len=256) as llm:
        refused = Refused(llm)
        if count_refused:
            llm.add_hooks(refused)
        texts = [each.outputs[0].text for each in llm.generate(PROMPTS, params)]
        accepted = counter(llm, "spec_decode_num_accepted_tokens") if config else 0
    return texts, accepted, refused.count


@pytest.fixture(scope="module")
def plain():
    return outputs(None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_text_stays_and_more_drafts_are_accepted(plain, name):
    texts, accepted, refused = outputs(NETWORKS[name], count_refused=True)
    followed, more, none = outputs(NETWORKS[name] | {"proposer_config": {"follow_grammars": True}}, count_refused=True)
    assert texts == followed == plain
    assert more > accepted
    assert refused > 0 == none


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_drawn_drafts_are_not_refused_either(form):
    options = {"follow_grammars": True, "draft_distribution": form}
    config = NETWORKS["draft"] | {"draft_sample_method": "probabilistic", "proposer_config": options}
    _, accepted, refused = outputs(config, temperature=1.0, count_refused=True)
    assert accepted > 0 == refused


def test_trees_are_not_drawn_under_grammars():
    with pytest.raises(Refusal, match="follow_grammars"):
        LLM(
            "tiny",
            speculative_config=NETWORKS["eagle3"] | {"max_nodes": 6, "proposer_config": {"follow_grammars": True}},
        )
