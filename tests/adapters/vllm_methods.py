"""Draft checkpoints that vLLM has methods of its own for, and what our engine drafts with them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec import SamplingParams
from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.engine import Engine
from specdec.sdk.packaged import packaged

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))  # which makes checkpoints

import gemma4_checkpoints
import pard_checkpoints

NUM_TOKENS = 24
CASES = ("draft_model", "eagle3", "PARD", "Gemma 4")
"""What vLLM 0.32 drafts alike with on a CPU. docs/reference/vllm-methods.md has the others, with the reasons."""


@dataclass(frozen=True)
class Case:
    """One checkpoint as both engines are asked for it: `speculative_config`, and what vLLM takes besides."""

    target: Path
    prompts: list[list[int]]
    ours: dict[str, Any]
    theirs: dict[str, Any]
    engine: dict[str, Any]


def case_of(name, directory, target, prompts):
    """The case of a name. target, prompts: of those that need none of their own."""
    if name == "Gemma 4":
        return gemma4(directory)
    ours, theirs = configs_of(name, directory)
    return Case(target, prompts, ours, theirs, {})


def gemma4(directory):
    """An assistant and its target, with heads as wide as vLLM's attention on a CPU takes them."""
    with gemma4_checkpoints.sizes(head_dim=32, global_head_dim=64, sliding_window=16):
        target = gemma4_checkpoints.make_target()
        prompts = gemma4_checkpoints.PROMPTS
        texts = [gemma4_checkpoints.generate(target, prompt, NUM_TOKENS) for prompt in prompts]
        target.save_pretrained(directory / "target")
        gemma4_checkpoints.make_assistant(target, texts, ordered=False).save_pretrained(directory / "drafter")
    asked = {"model": str(directory / "drafter"), "num_speculative_tokens": 3}
    ours, theirs = asked | {"method": "gemma4_assistant"}, asked | {"method": "mtp"}
    return Case(directory / "target", prompts, ours, theirs, {"skip_tokenizer_init": True, "max_model_len": 256})


def configs_of(name, directory):
    """Our `speculative_config` and vLLM's."""
    if name == "PARD":
        path, k, method = pard_checkpoints.pard(directory / "drafter").save().path, 4, "draft_model"
    else:
        path, k, method = packaged(f"tiny/{'draft' if name == 'draft_model' else name}"), 3, name
    config = {"method": method, "model": str(path), "num_speculative_tokens": k}
    parallel = {"parallel_drafting": True} if name == "PARD" else {}
    return config | parallel, config | parallel


def drafts_of_the_core(target, prompts, config, longest=512):
    """As `stepwise` of run_vllm.py."""
    settings = EngineConfig(model=target, device="cpu", dtype="float32", max_num_seqs=8, max_model_len=longest)
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
