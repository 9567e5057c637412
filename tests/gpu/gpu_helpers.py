"""Engines on a CUDA device over the packaged models, in fp32 so that they agree with a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import specdec
from specdec import LLM, SamplingParams

TINY = (Path(specdec.__file__).parent / "assets" / "tiny").resolve()
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
DRAFTERS = {  # by class path: a checkout that is not installed has no entry points
    "eagle3": "specdec.plugins.eagle.proposer:Eagle3Proposer",
    "eagle": "specdec.plugins.eagle.proposer:EagleProposer",
    "dflash": "specdec.plugins.dflash.proposer:DFlashProposer",
    "medusa": "specdec.plugins.medusa.proposer:MedusaProposer",
    "draft": "specdec.plugins.draft_model.proposer:DraftModelProposer",
}
NGRAM = {"method": "specdec.plugins.ngram:NgramProposer", "num_speculative_tokens": 4}


def speculation(name: str, k: int = 3) -> dict:
    return {"method": DRAFTERS[name], "model": str(TINY / name), "num_speculative_tokens": k}


def engine(device: str = "cuda", **settings) -> LLM:
    return LLM("tiny", **{"device": device, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8} | settings)


def prompts(llm: LLM, count: int = 6) -> list[list[int]]:
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    return [llm.engine.encode(row["prompt"]) for row in rows[::3][:count]]


def generate(llm: LLM, count: int = 6, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts(llm, count)], params)
    return [list(output.outputs[0].token_ids) for output in outputs]
