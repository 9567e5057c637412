"""vLLM's own methods draft what ours draft from the same weights, token for token."""

from __future__ import annotations

import pytest
from vllm_methods import CASES, NUM_TOKENS, case_of, compared_drafts, drafts_of_the_core
from vllm_process import job_of

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", CASES)
def test_the_drafts_of_vllms_own_method_are_ours(run_job, vllm_target, prompts, tmp_path, name):
    case = case_of(name, tmp_path, vllm_target, prompts[:3])
    texts, drafts = drafts_of_the_core(case.target, case.prompts, case.ours, case.engine.get("max_model_len", 512))
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    settings = {"speculative_config": case.theirs, "enable_prefix_caching": False, **case.engine}
    run = run_job(job_of(case.target, case.prompts, sampling=sampling, stepwise=True, **settings))
    assert run["error"] is None
    assert run["outputs"] == [texts]
    assert compared_drafts(drafts, run["drafts"][0]) > 30
