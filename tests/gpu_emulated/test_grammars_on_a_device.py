"""Networks that draw under grammars on a device: text and drafts are those of a CPU, beside free requests too."""

from __future__ import annotations

import pytest
from serving import DEVICE, K

from specdec import LLM, SamplingParams

ASKED = {"json": {"type": "object", "properties": {"n": {"enum": [1, 22]}, "s": {"enum": ["ab", "b"]}}}}
PROMPTS = ["def main(", "import os\n", "x = "]


def served(name, **settings):
    speculative = DEVICE[name] | {"num_speculative_tokens": K, "proposer_config": {"follow_grammars": True}}
    params = [SamplingParams(temperature=0, max_tokens=16, structured_outputs=each) for each in (ASKED, ASKED, None)]
    with LLM("tiny", speculative_config=speculative, dtype="float32", max_model_len=128, **settings) as llm:
        texts = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)]
        return texts, llm.engine.metrics.acceptance.num_accepted_tokens, llm.engine.metrics.proposer_errors


@pytest.mark.full
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_text_and_drafts_are_those_of_a_cpu(name, cuda):
    texts, accepted, errors = served(name, device="cuda", max_num_seqs=3)
    assert (texts, accepted) == served(name, device="cpu")[:2]
    assert not errors
