"""A row of a call of `generate`: its tokens as they grow, what was computed of them, and when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.core.host import Request


@dataclass
class Text:
    """Positions count from its first token that is no padding."""

    ids: Tensor  # [1, padding + T + K] int64: padding, the text, then room for drafts
    num_padding: int
    num_prompt_tokens: int
    max_tokens: int  # T: prompt and output
    length: int  # of prompt and output, as far as they stand
    num_held: int = 0  # tokens of the prompt that the call's cache brought
    ended: bool = False
    scores: list[Tensor] = field(default_factory=list)  # [V] of each output token
    logits: list[Tensor] = field(default_factory=list)  # [V] before the processors, likewise
    request: Request = field(init=False)  # the engine's side of it
    last_scores: Tensor = field(init=False)  # [R, V] of the last pass, drafts included
    _last_logits: Tensor = field(init=False)

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens without padding."""
        start = self.num_padding
        token_ids: list[int] = self.ids[0, start : start + self.num_prompt_tokens].tolist()
        return token_ids

    @property
    def num_output_tokens(self) -> int:
        return self.length - self.num_prompt_tokens

    @property
    def num_computed(self) -> int:
        """Tokens of it that have keys and values."""
        return min(self.request.num_computed_tokens, self.length)

    def upto(self, length: int) -> Tensor:
        """Padding and the first `length` tokens of the text: [1, padding + length]."""
        return self.ids[:, : self.num_padding + length]

    def process(self, processors: Any, logits: Tensor, drafts: Sequence[int]) -> Tensor:
        """Scores [R, V] of logits [R, V] after the text and each of its drafts, as plain decoding has them there."""
        self._write(drafts)
        scores = logits.clone()  # processors may write
        for i in range(len(scores) if processors else 0):
            if i > 0 and scores[i - 1, drafts[i - 1]] == -torch.inf:
                break  # it is rejected, and what ruled it out may know no text that goes on from there
            scores[i : i + 1] = processors(self.upto(self.length + i), scores[i : i + 1])
        self.last_scores, self._last_logits = scores, logits
        return scores

    def commit(self, token_ids: Sequence[int], criteria: Any, keep_scores: bool, keep_logits: bool) -> None:
        """Take the output tokens of a step, up to the one with which the criteria end the text."""
        self._write(token_ids)
        if keep_scores:
            self.scores += self.last_scores[: len(token_ids)].unbind()
        if keep_logits:
            self.logits += self._last_logits[: len(token_ids)].unbind()
        for _ in token_ids:
            self.length += 1
            scores = tuple(each[None] for each in self.scores[: self.num_output_tokens])
            if bool(criteria(self.upto(self.length), scores or None).all()):
                self.ended = True
                return

    def _write(self, token_ids: Sequence[int]) -> None:
        """Put tokens behind the text."""
        first = self.num_padding + self.length
        self.ids[0, first : first + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
