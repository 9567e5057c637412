"""What holds of every drafter that a replay can follow. A test file brings its engines and its replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from inside import proposer_of
from replaying import (
    ROOMS,
    assert_replayed,
    continued,
    nucleus,
    reported_distribution,
    speculate,
    tiny_prompts,
    tiny_truth,
)
from torch import Tensor

from specdec import LLM, SamplingParams
from specdec.sdk import Draft

V = 4096  # tokens of the tiny models
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=16, ignore_eos=True, seed=1)

Replay = Callable[[list[int], int], list[int]]
"""What is drafted greedily after committed tokens."""

Logits = Callable[[list[int], int, list[int]], Tensor]
"""The logits [n, V] of n drafts after a text, of which these were drawn."""


def engines_of(default: str) -> Callable[..., LLM]:
    """Starts engines for the tiny target with a method and a checkpoint: `engine(directory, k, ...)`."""

    def engine(directory: Path, k: int, *, method: str = default, speculative: Any = None, **settings: Any) -> LLM:
        return speculate("tiny", method, k, speculative={"model": str(directory)} | (speculative or {}), **settings)

    return engine


def replayed(llm: LLM, draft: Replay, index: int, k: int, every: int = 1) -> int:
    """`assert_replayed` on a prompt by its number."""
    return assert_replayed(llm, draft, tiny_truth()[index], len(tiny_prompts()[index]), k, every)


def told(llm: LLM, pattern: Sequence[int] = (0,)) -> LLM:
    """An engine whose forced proposer knows the texts, and how much of each draft is to be right."""
    proposer = proposer_of(llm)
    proposer.known, proposer.pattern = tuple(tiny_truth()), tuple(pattern)
    proposer.drafts.clear()
    return llm


def assert_drafts_of_a_fresh_prefill(llm: LLM, pattern: Sequence[int], draft: Replay, every: int = 12) -> None:
    """What a forced proposer drafts after a history is what a replay drafts that knows the text alone."""
    drafts = proposer_of(told(llm, pattern)).drafts
    continued(llm, tiny_prompts()[1:6])
    assert len(drafts) > 15
    for committed, found in list(drafts.items())[::every]:
        assert found == draft(list(committed), len(found))


def assert_same_drafts(engines: Iterable[LLM], pattern: Sequence[int], prompts: slice = slice(2, 4)) -> None:
    """Engines with forced proposers draft the same, one prompt after the other."""
    found = []
    for llm in engines:
        told(llm, pattern)
        for prompt in tiny_prompts()[prompts]:
            continued(llm, [prompt])
        found.append(dict(proposer_of(llm).drafts))
    assert found[1:] == found[:-1]
    assert len(found[0]) > 5


def assert_plain_text_in_chunks_and_with_preemption(llm_in: Callable[..., LLM]) -> None:
    """`llm_in(**settings)` starts an engine."""
    llm = llm_in(**(ROOMS["chunked"] | ROOMS["scarce"]))
    assert continued(llm, tiny_prompts()[:5]) == tiny_truth()[:5]
    assert llm.engine.metrics.counts["num_preemptions"] > 0


def probabilistic(distribution: str = "sparse") -> dict[str, Any]:
    """What a speculative_config says for drafts that are drawn, and reported whole."""
    options = {"draft_distribution": distribution, "sparse_top_m": V}
    return {"draft_sample_method": "probabilistic", "proposer_config": options}


def sampled_drafts(llm: LLM, max_tokens: int = 16) -> tuple[list[int], list[tuple[int, int, Draft]]]:
    """A text that was drawn, and of each draft of a recording proposer the length before it and its own."""
    (text,) = continued(llm, tiny_prompts()[4:5], SAMPLED.replace(max_tokens=max_tokens))
    found = [(length, int(draft.lengths[0]), draft) for length, draft in proposer_of(llm).steps]
    return text, [each for each in found if each[1]]


def assert_drawn_from(
    llm: LLM, logits: Logits, target_ids: Tensor | None = None, max_tokens: int = 16, atol: float = 1e-4
) -> None:
    """The distributions that a recording proposer reports are those that its drafts were drawn from.

    target_ids: of a smaller draft vocabulary.
    """
    text, steps = sampled_drafts(llm, max_tokens)
    assert len(steps) > 1 + max_tokens // 8
    for length, count, draft in steps:
        drawn = draft.token_ids[0, :count]
        expected = nucleus((logits(text[:length], count, drawn.tolist())[:count] / 0.8).softmax(-1), 0.9)
        if target_ids is not None:
            expected = torch.zeros(count, V).index_copy(1, target_ids, expected)
        found = reported_distribution(draft, V, target_ids)[:count]
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=atol)
        assert bool((found.gather(1, drawn[:, None]) > 0).all())
