"""Engines that draft with a made checkpoint of the DFlash family, and their drafts against a replay."""

from __future__ import annotations

import facts
import replaying
import torch
from make_dflash import Made, Replay
from plugin_helpers import GREEDY
from walk_replay import WalkReplay

from specdec import LLM

NUM_TOKENS = GREEDY.max_tokens


def speculate(made: Made, k: int, *, method: str | None = None, speculative=None, **settings) -> LLM:
    """Without a `method` the checkpoint says itself which proposer it is for."""
    config = {"model": str(made.path), "num_speculative_tokens": k} | (speculative or {})
    if method is not None:
        config["method"] = method
    return LLM("tiny", speculative_config=config, **({"max_model_len": 256} | settings))


def assert_replayed(
    llm: LLM, replay: Replay, sequence: list[int], num_prompt: int, k: int, num_tokens: int = NUM_TOKENS
) -> int:
    """Every draft and accepted count of one prompt against the replay. Returns how many tokens were accepted."""

    def draft(committed: list[int], count: int) -> list[int]:
        return replay.draft(sequence, len(committed), k)[:count]

    return replaying.assert_replayed(llm, draft, sequence, num_prompt, k, params=GREEDY.replace(max_tokens=num_tokens))


def assert_drawn_from(llm: LLM, logits: facts.Logits, made: Made, max_tokens: int, atol: float = 1e-4) -> None:
    """The distributions that are reported are those drawn from, whatever the draft vocabulary is."""
    facts.assert_drawn_from(llm, logits, target_ids(made), max_tokens, atol)


def walked(replay: WalkReplay) -> facts.Logits:
    """The logits of tokens that were drawn from left to right, each after those before it."""
    return lambda text, count, drawn: replay.walked(text, len(text), 4, drawn).logits


def target_ids(made: Made) -> torch.Tensor | None:
    """Of the tokens that it drafts; None: the target's own."""
    d2t = made.tensors.get("d2t")
    return None if d2t is None else torch.arange(len(d2t)) + d2t
