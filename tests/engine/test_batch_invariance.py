"""On a CPU a token's logits do not depend on what is computed beside it: not in the last bit, not in bfloat16."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import counter, make_llm

from specdec import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
by_onednn = pytest.mark.skipif(
    bool(torch.cpu.get_capabilities().get("amx_bf16")), reason="oneDNN multiplies bfloat16 on this processor"
)
DTYPES = ["float32", pytest.param("bfloat16", marks=by_onednn)]


def outcome(llm, prompts):
    """Tokens, and the exact logarithms of their probabilities."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    return [(list(each.outputs[0].token_ids), each.outputs[0].logprobs) for each in outputs]


@pytest.fixture(scope="module", params=DTYPES)
def alone(request, prompts):
    """A dtype, and what plain decoding gives for each prompt on its own, prompts computed a token at a time."""
    llm = make_llm(dtype=request.param, max_num_seqs=1, max_num_batched_tokens=1)
    return request.param, outcome(llm, prompts[:8])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 33},
        {"proposer": "ngram", "k": 5},
        {"proposer": "ngram", "k": 3, "max_num_seqs": 2},
        {"proposer": "eagle3", "k": 4, "speculative": {"model": "tiny/eagle3"}},
    ],
    ids=str,
)
def test_logits_are_those_of_a_request_alone(settings, alone, prompts):
    dtype, expected = alone
    llm = make_llm(dtype=dtype, **settings)
    assert outcome(llm, prompts[:8]) == expected
    assert "proposer" not in settings or counter(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [2, 4])  # three would divide PyTorch's activations within vectors
def test_nor_do_they_depend_on_threads(num_threads, alone, prompts):
    dtype, expected = alone
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert outcome(make_llm(dtype=dtype), prompts[:8]) == expected
    finally:
        torch.set_num_threads(before)
