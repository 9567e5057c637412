"""Methods that vLLM has in its V2 runner alone draft what ours draft from the same weights, token for token."""

from __future__ import annotations

import pytest
from vllm_methods import CASES_OF_V2, NUM_TOKENS, case_of, compared_drafts, drafts_of_the_core

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", CASES_OF_V2)
def test_the_drafts_of_vllms_own_method_are_ours(run_engine, vllm_target, batch, tmp_path, name):
    case = case_of(name, tmp_path, vllm_target, batch[:3])
    texts, drafts = drafts_of_the_core(case.target, case.prompts, case.ours, case.engine.get("max_model_len", 512))
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    settings = {"speculative_config": case.theirs, "enable_prefix_caching": False, "model": str(case.target)}
    run = run_engine(batches=[case.prompts], sampling=sampling, stepwise=True, **settings, **case.engine)
    assert run["error"] is None, run["error"]
    assert run["v2"]
    assert run["outputs"] == [texts]
    assert compared_drafts(drafts, run["drafts"][0]) > 30
