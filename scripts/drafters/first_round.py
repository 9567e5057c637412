"""The measure of every drafter: the first draft after a held-out prompt, greedy against greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..corpus import Document
from .target import FrozenTarget, Observation

PROMPT_LENGTH = 128
MAX_TOKENS_PER_DOCUMENT = 5 * 1024  # so that no long file decides the figure


@dataclass(frozen=True)
class FirstRounds:
    """What the target does after each prompt, and what a drafter may know of it."""

    prompts: Tensor  # [B, n] int64
    observation: Observation  # of the prompts
    greedy: Tensor  # [B, K + 1] int64: the bonus token, then what the drafts have to equal

    @property
    def next_tokens(self) -> Tensor:
        """The token after each prompt position, bonus token last: [B, n]."""
        return torch.cat([self.prompts[:, 1:], self.greedy[:, :1]], dim=1)


@dataclass(frozen=True)
class Acceptance:
    prompts: int
    tokens_per_verify: float  # accepted drafts + 1
    accepted_per_position: tuple[float, ...]  # the share of prompts whose draft was accepted up to there


def held_out_prompts(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], count: int) -> Tensor:
    """`count` chunks of `PROMPT_LENGTH` tokens, evenly spread over the documents: [count, PROMPT_LENGTH]."""
    chunks: list[Tensor] = []
    for document in documents:
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
        chunks.extend(torch.tensor(ids[:MAX_TOKENS_PER_DOCUMENT]).split(PROMPT_LENGTH))
    whole = torch.stack([chunk for chunk in chunks if len(chunk) == PROMPT_LENGTH])
    if len(whole) < count:
        raise ValueError(f"expected at least {count} held-out prompts, found {len(whole)}: ask for fewer")
    return whole[torch.linspace(0, len(whole) - 1, count).long()]


def first_rounds(target: FrozenTarget, prompts: Tensor, num_drafts: int) -> FirstRounds:
    return FirstRounds(prompts, target.observe(prompts), target.continue_greedily(prompts, num_drafts + 1))


def acceptance(rounds: FirstRounds, drafts: Tensor) -> Acceptance:
    """How much of `drafts` [B, K] the target accepts."""
    matches = drafts == rounds.greedy[:, 1 : drafts.shape[1] + 1]
    accepted = matches.long().cumprod(dim=1).double()
    return Acceptance(
        prompts=len(drafts),
        tokens_per_verify=1 + accepted.sum(1).mean().item(),
        accepted_per_position=tuple(accepted.mean(0).tolist()),
    )
