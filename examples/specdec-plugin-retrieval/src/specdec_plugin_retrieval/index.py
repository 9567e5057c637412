"""A corpus of token ids in which any text's ending is found by binary search.

Letters: T tokens of the corpus, P places, m tokens compared, k tokens drafted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
"""Stands behind every document. No text contains it, so no match and no draft goes from one document to the next."""

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Matches:
    """Where the corpus goes on after the longest ending of a text that occurs in it."""

    length: int  # tokens of the ending
    places: Ids  # [n], of the tokens that followed it; empty without a match


@dataclass(frozen=True)
class CorpusIndex:
    """Places of the corpus, sorted by the tokens before them read backwards: a suffix array of the reversed corpus.

    Equal contexts are neighbours, and the longer the context that a text shares with a place, the nearer it lies to
    where the text itself would be sorted in. So one search finds the longest match, whatever its length.
    """

    tokens: Ids  # [T]
    places: Ids  # [P], of every token that has one before it
    depth: int  # tokens of context by which places are sorted, and the most that a match can have

    @classmethod
    def build(cls, documents: Sequence[Sequence[int]], depth: int) -> CorpusIndex:
        """Sort all places by their last `depth` tokens of context: O(T log T log depth) time, 40 bytes per token."""
        parts = [np.array([*document, SEPARATOR], dtype=np.int32) for document in documents]
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        order = np.argsort(_ranks(tokens, depth), kind="stable").astype(np.int32)
        has_context = np.append(False, tokens[:-1] != SEPARATOR)[: len(tokens)]
        places = order[(has_context & (tokens != SEPARATOR))[order]]
        return cls(tokens, places, depth)

    def matches(self, text: Sequence[int], min_length: int) -> Matches:
        """The longest ending of `text` that occurs, if it has `min_length` tokens. O(m log P) comparisons."""
        ending = list(text[: -self.depth - 1 : -1])  # backwards
        near = bisect_left(self.places, ending, key=lambda place: self._context(place, len(ending)))
        length = max((self._agreement(ending, place) for place in self.places[max(near - 1, 0) : near + 1]), default=0)
        if length < min_length:
            return Matches(0, self.places[:0])
        common = ending[:length]
        first = bisect_left(self.places, common, hi=near, key=lambda place: self._context(place, length))
        end = bisect_right(self.places, common, lo=near, key=lambda place: self._context(place, length))
        return Matches(length, self.places[first:end])

    def followers(self, places: Ids, num_tokens: int) -> Ids:
        """The tokens from each place on: [n, num_tokens], SEPARATOR behind the corpus's end."""
        wanted = places[:, None].astype(np.int64) + np.arange(num_tokens)
        found = self.tokens[np.minimum(wanted, len(self.tokens) - 1)]
        return np.where(wanted < len(self.tokens), found, SEPARATOR)

    def _context(self, place: int, length: int) -> list[int]:
        """The tokens before a place, backwards."""
        before: list[int] = self.tokens[max(place - length, 0) : place].tolist()
        return before[::-1]

    def _agreement(self, ending: list[int], place: int) -> int:
        context = self._context(place, len(ending))
        return next((i for i, (a, b) in enumerate(zip(ending, context, strict=False)) if a != b), len(context))


def _ranks(tokens: Ids, depth: int) -> NDArray[np.int64]:
    """The rank of each place among all, by its context: prefix doubling, from one token to at least `depth`."""
    rank = np.zeros(len(tokens), dtype=np.int64)
    rank[1:] = tokens[:-1].astype(np.int64) + 1
    length = 1
    while length < depth:
        before = np.zeros_like(rank)  # the rank of what lies `length` tokens further back
        before[length:] = rank[:-length]
        rank = np.unique(rank * (before.max(initial=0) + 1) + before, return_inverse=True)[1]
        length *= 2
    return rank
