"""Proposers inside vLLM's V2 model runner: what it generates with them is what it generates without."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.full


def test_the_runner_runs_where_there_is_no_gpu_and_generates_what_our_core_does(plain, batch):
    from specdec import LLM, SamplingParams

    llm = LLM("tiny", max_model_len=512, max_num_seqs=8)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], SamplingParams(temperature=0, max_tokens=48))
    assert plain == [[list(output.outputs[0].token_ids)] for output in outputs]
