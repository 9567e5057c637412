"""Engines that draft with a made checkpoint of the DFlash family, and their drafts against a replay."""

from __future__ import annotations

import json

import make_dflash
import torch
from make_dflash import Made, Replay
from plugin_helpers import GREEDY, TINY, drafted_by_engine
from transformers import AutoTokenizer

from specdec import LLM, SamplingParams

NUM_TOKENS = GREEDY.max_tokens


def shipped_prompts() -> list[list[int]]:
    """16 of the shipped prompts, cut to mixed lengths."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    return [tokenizer(row["prompt"])["input_ids"][: 12 + 5 * index] for index, row in enumerate(rows[:16])]


def speculate(made: Made, k: int, *, method: str | None = None, speculative=None, **settings) -> LLM:
    config = {"model": str(made.path), "num_speculative_tokens": k} | (speculative or {})
    if method is not None:
        config["method"] = method
    return LLM("tiny", speculative_config=config, **({"max_model_len": 256} | settings))


def generate(llm: LLM, prompts, params=GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_replayed(
    llm: LLM, replay: Replay, sequence: list[int], num_prompt: int, k: int, num_tokens: int = NUM_TOKENS
) -> int:
    """Every draft and accepted count of one prompt against the replay. Returns how many tokens were accepted."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    seen = drafted_by_engine(llm, sequence[:num_prompt], params)
    assert seen, "nothing was drafted"
    for each in seen:
        length = len(each.committed)
        assert each.committed == sequence[:length]
        assert len(each.draft) == min(k, num_prompt + num_tokens - length - 1)
        assert each.draft == replay.draft(sequence, length, k)[: len(each.draft)], f"at length {length}"
        right = [mine == theirs for mine, theirs in zip(each.draft, sequence[length:], strict=False)]
        assert each.num_accepted == [*right, False].index(False)
    return sum(each.num_accepted for each in seen)


def nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = probs.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
    return torch.zeros_like(probs).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))


def reported(draft, made: Made) -> torch.Tensor:
    """The distribution of a draft's one row over target ids, [K, V]."""
    whole = torch.zeros(draft.token_ids.shape[1], make_dflash.V)
    if draft.distribution.sparse_ids is not None:
        ids, probs = draft.distribution.sparse_ids[0], draft.distribution.sparse_probs[0]
        return whole.scatter_add(-1, ids.clamp(min=0), probs.masked_fill(ids < 0, 0))
    probs = draft.distribution.draft_logits[0].softmax(-1)
    if "d2t" not in made.tensors:
        return probs
    whole[:, torch.arange(probs.shape[1]) + made.tensors["d2t"]] = probs
    return whole
