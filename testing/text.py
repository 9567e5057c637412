"""What the scripted engine generates: pure functions of a seed, a request's name and its tokens so far."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ALPHABET = 40  # few different tokens, so that text repeats itself
MOST_ACCEPTED = 32  # drafts of a step: a text stays within its limit, however long drafts are


@dataclass(frozen=True)
class Script:
    """The target that there is not: how many drafts it accepts, and what it says next.

    Nothing depends on the batch, so that two schedules of the same requests can be compared.
    """

    seed: int
    vocab_size: int

    def prompt(self, name: str, length: int) -> list[int]:
        """Text that repeats itself with small changes."""
        tokens: list[int] = []
        while len(tokens) < length:
            tokens.append(self.token(name, tokens))
        return tokens

    def token(self, name: str, tokens: Sequence[int], instead_of: int | None = None) -> int:
        """The token after `tokens`; another one than `instead_of`, the draft that was rejected there."""
        dice = self._dice("token", name, len(tokens))
        period = 5 + self._dice("period", name, 0).randrange(5)
        fresh = dice.randrange(min(ALPHABET, self.vocab_size))
        token = tokens[-period] if len(tokens) >= period and dice.random() < 0.8 else fresh
        return token if token != instead_of else (token + 1) % self.vocab_size

    def num_accepted(self, name: str, length: int, num_drafts: int) -> int:
        """How many of the drafts after `length` tokens are right: none, some, or all up to MOST_ACCEPTED."""
        return self._dice("accept", name, length).randint(0, min(num_drafts, MOST_ACCEPTED))

    def _dice(self, purpose: str, name: str, length: int) -> random.Random:
        return random.Random(f"{self.seed}:{purpose}:{name}:{length}")
