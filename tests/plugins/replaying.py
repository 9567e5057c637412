"""For tests that replay drafts: prompts, plain texts, engines, and proposers that are told what to accept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from plugin_helpers import GREEDY, TINY, drafted_by_engine
from torch import Tensor
from transformers import AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.sdk import Draft, RequestView, StepView

NUM_TOKENS = GREEDY.max_tokens
MAX_MODEL_LEN = 256
ROOMS: dict[str, dict[str, int]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 32},
    "scarce": {"num_kv_blocks": 14, "block_size": 16},
}


@cache
def tiny_prompts() -> list[list[int]]:
    """16 of the shipped prompts, cut to mixed lengths."""
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text().splitlines()]
    return [tokenizer(row["prompt"])["input_ids"][: 12 + 5 * index] for index, row in enumerate(rows[:16])]


@cache
def tiny_truth() -> list[list[int]]:
    """The prompts with what plain decoding appends."""
    return continued(LLM("tiny", max_model_len=MAX_MODEL_LEN), tiny_prompts())


def continued(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """The prompts with what the engine appends."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]


def speculate(target: str | Path, method: str, k: int, *, speculative: Any = None, **settings: Any) -> LLM:
    """An engine; `speculative` are further keys of the speculative_config."""
    config = {"method": method, "num_speculative_tokens": k} | (speculative or {})
    return LLM(str(target), speculative_config=config, **({"max_model_len": MAX_MODEL_LEN} | settings))


def assert_replayed(
    llm: LLM,
    draft: Callable[[list[int], int], list[int]],
    sequence: list[int],
    num_prompt: int,
    k: int,
    every: int = 1,
    params: SamplingParams = GREEDY,
) -> int:
    """Every accepted count and each `every`-th draft of one prompt against a replay. Returns the accepted tokens.

    `draft(committed, k)` is what the replay drafts.
    """
    seen = drafted_by_engine(llm, sequence[:num_prompt], params)
    assert seen, "nothing was drafted"
    for number, each in enumerate(seen):
        length = len(each.committed)
        assert each.committed == sequence[:length]
        count = min(k, num_prompt + params.max_tokens - length - 1)
        assert len(each.draft) == count
        if number % every == 0:
            assert each.draft == draft(each.committed, count), f"at length {length}"
        right = [mine == theirs for mine, theirs in zip(each.draft, sequence[length:], strict=False)]
        assert each.num_accepted == [*right, False].index(False)
    return sum(each.num_accepted for each in seen)


class Forced:
    """Mixed into a proposer: drafts known tokens, right as far as `pattern` says in turn; keeps what it would draft."""

    known: tuple[list[int], ...] = ()
    pattern: tuple[int, ...] = (0,)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.drafts: dict[tuple[int, ...], list[int]] = {}  # by committed tokens
        self.distributions: dict[tuple[int, ...], Draft] = {}
        self._sequence: dict[str, list[int]] = {}
        self._turn = 0

    def on_start(self, request: RequestView) -> None:
        prompt = list(request.prompt_token_ids)
        self._sequence[request.request_id] = next(each for each in self.known if each[: len(prompt)] == prompt)

    def propose(self, step: StepView) -> Draft:
        real = super().propose(step)
        forced = []
        lengths = zip(step.request_ids, step.committed_length.tolist(), real.lengths.tolist(), strict=True)
        for b, (request_id, length, count) in enumerate(lengths):
            sequence = self._sequence[request_id]
            if count:
                self.drafts[tuple(sequence[:length])] = real.token_ids[b, :count].tolist()
            right = self.pattern[self._turn % len(self.pattern)]
            self._turn += 1
            draft = sequence[length : length + count]
            vocab_size = self.target.vocab_size
            forced.append([token if i < right else (token + 1) % vocab_size for i, token in enumerate(draft)])
        return Draft.from_lists(forced, step.width)


class Shown:
    """Mixed into a forced proposer: keeps the hidden states that it is shown, by the tokens up to their position."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.shown: dict[tuple[int, ...], Tensor] = {}

    def observe(self, step: StepView) -> None:
        super().observe(step)
        kept = step.kept
        for b, request_id in enumerate(step.request_ids):
            first = int(kept.token_offsets[b])
            for entry in range(first, first + int(kept.num_kept[b])):
                tokens = self._sequence[request_id][: int(kept.positions[entry]) + 1]
                self.shown[tuple(tokens)] = kept.hidden_cat()[entry].clone()


class InDeviceForm:
    """Mixed into a proposer: sees the step as on a device, rejected rows between the kept ones."""

    @classmethod
    def needs(cls, config: Any, target: Any) -> Any:
        return super().needs(config, target).replace(placement="device")


class Recording:
    """Mixed into a proposer: keeps every draft of a lone request with the length that it follows."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[tuple[int, Draft]] = []

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        self.steps.append((int(step.committed_length[0]), draft))
        return draft


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The distribution after top-p, over the last dimension."""
    ordered, order = probs.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
    return torch.zeros_like(probs).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))


def reported_distribution(draft: Draft, vocab_size: int, target_ids: Tensor | None = None) -> Tensor:
    """The distribution of a draft's one row over target ids, [K, V]. `target_ids`: of a smaller draft vocabulary."""
    whole = torch.zeros(draft.token_ids.shape[1], vocab_size)
    if draft.distribution.sparse_ids is not None:
        ids, probs = draft.distribution.sparse_ids[0], draft.distribution.sparse_probs[0]
        return whole.scatter_add(-1, ids.clamp(min=0), probs.masked_fill(ids < 0, 0))
    probs = draft.distribution.logits[0].softmax(-1)
    if target_ids is None:
        return probs
    whole[:, target_ids] = probs
    return whole
