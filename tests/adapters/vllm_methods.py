"""Draft checkpoints that vLLM has methods of its own for, and what our engine drafts with them."""

from __future__ import annotations

import sys
from pathlib import Path

from specdec import SamplingParams
from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.engine import Engine
from specdec.sdk.packaged import packaged

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))  # which makes checkpoints

import pard_checkpoints

NUM_TOKENS = 24
CASES = ("draft_model", "eagle3", "PARD")
"""What vLLM 0.32 drafts alike with on a CPU. docs/reference/vllm-methods.md has the others, with the reasons."""


def configs_of(name, directory):
    """Our `speculative_config` and vLLM's."""
    if name == "PARD":
        path, k, method = pard_checkpoints.pard(directory / "drafter").save().path, 4, "draft_model"
    else:
        path, k, method = packaged(f"tiny/{'draft' if name == 'draft_model' else name}"), 3, name
    config = {"method": method, "model": str(path), "num_speculative_tokens": k}
    parallel = {"parallel_drafting": True} if name == "PARD" else {}
    return config | parallel, config | parallel


def drafts_of_the_core(target, prompts, config):
    """As `stepwise` of run_vllm.py."""
    settings = EngineConfig(model=target, device="cpu", dtype="float32", max_num_seqs=8, max_model_len=512)
    engine = Engine(settings, config)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    texts, drafts = [[] for _ in prompts], [{} for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, params, str(number))
    while engine.has_unfinished_requests:
        for each in engine.step():
            number = int(each.request.request_id)
            texts[number] = list(each.request.output_token_ids)
            if each.draft_token_ids:
                drafts[number][str(each.length - len(each.token_ids))] = each.draft_token_ids
    engine.close()
    return [[text] for text in texts], drafts
