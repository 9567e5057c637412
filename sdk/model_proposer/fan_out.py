"""Which outcomes of a draft to prepare for: the likeliest, by what was counted so far."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

NUM_GUESSES = 8
"""The likeliest tokens after each place: more guesses of one place are never prepared for."""

ACCEPTED = 0.7
"""The share of drafts that are accepted, before any was counted."""

WEIGHT = 4.0
"""Of what is assumed, in outcomes that are counted."""

REMEMBERED = 512
"""Outcomes. When there are more, all counts are halved, so that later ones weigh more."""


class Guess(NamedTuple):
    """An outcome that does not name its token."""

    num_accepted: int
    rank: int  # of the token behind them among the likeliest, 0 first; the draft that was rejected is left out


class FanOut:
    """How many tokens to guess behind each number of accepted drafts.

    With one rate of acceptance, and ranks that fall by a power, these numbers are the capped geometric series of SSD
    (arXiv 2603.03251). They fall with each draft, and rise behind the last one, where nothing was rejected. That is
    assumed first. What is counted takes its place.
    """

    def __init__(self) -> None:
        self._reached: Counter[int] = Counter()  # drafts that were verified, by place
        self._accepted: Counter[int] = Counter()
        self._ranks: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}  # by whether all were accepted
        self._count = 0

    def record(self, num_accepted: int, num_drafts: int, rank: int) -> None:
        """What the target made of a draft. rank: NUM_GUESSES for a token that is none of the likeliest."""
        self._count += 1
        if self._count > REMEMBERED:
            self._halve()
        self._reached.update(range(min(num_accepted + 1, num_drafts)))
        self._accepted.update(range(num_accepted))
        self._ranks[num_accepted == num_drafts][rank] += 1

    def best(self, num_drafts: int, count: int) -> list[Guess]:
        """The likeliest outcomes of a draft of so many tokens, `count` at most."""
        found: list[tuple[float, Guess]] = []
        reach = 1.0
        for num_accepted in range(num_drafts + 1):
            is_last = num_accepted == num_drafts
            rate = 0.0 if is_last else self._rate(num_accepted)
            shares = self._shares(is_last)[: NUM_GUESSES - (not is_last)]
            found += [(reach * (1 - rate) * share, Guess(num_accepted, rank)) for rank, share in enumerate(shares)]
            reach *= rate
        return [guess for _, guess in sorted(found, reverse=True)[:count]]

    def _rate(self, place: int) -> float:
        return (self._accepted[place] + WEIGHT * ACCEPTED) / (self._reached[place] + WEIGHT)

    def _shares(self, is_last: bool) -> list[float]:
        """The share of each rank, and that of all tokens that are not guessed."""
        counted = self._ranks[is_last]
        assumed = [1 / (rank + 1) ** 2 for rank in range(NUM_GUESSES + 1)]
        scale, total = WEIGHT / sum(assumed), WEIGHT + counted.total()
        return [(counted[rank] + scale * share) / total for rank, share in enumerate(assumed)]

    def _halve(self) -> None:
        self._count //= 2
        for counts in (self._reached, self._accepted, *self._ranks.values()):
            for key in counts:
                counts[key] //= 2
