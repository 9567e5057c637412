"""Draft networks that draw under the grammars of requests: nothing that is refused is drafted, the text stays."""

from __future__ import annotations

import pytest
from engine_helpers import counter

from specdec import LLM, SamplingParams
from specdec.core.engine.assembly import parts_of
from specdec.sdk import Refusal, hookimpl

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
    """Counts drafts that the grammar of their request refuses."""

    def __init__(self, llm):
        parts = parts_of(llm)
        self.count, self._grammars, self._vocab_size = 0, parts.grammars, parts.info.vocab_size

    @hookimpl
    def on_verified(self, step):
        for each in step.requests:
            grammar, tokens = self._grammars.of(each.request_id), each.draft_token_ids[each.num_accepted :]
            if grammar is not None and len(each.token_ids) == each.num_accepted + 1:
                self.count += bool(tokens) and self._is_refused(grammar, each, tokens[0])

    def _is_refused(self, grammar, each, token):
        grammar._state.rollback(1)  # the token after the accepted drafts is committed by now
        allowed = grammar.allowed([], self._vocab_size)
        assert grammar.accept(each.token_ids[-1])
        return not bool(allowed[token])


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
