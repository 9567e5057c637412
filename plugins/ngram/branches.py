"""The n-grams of one growing text with all places where they occurred, for drafts that are trees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from specdec.sdk.trees import Tree, best_first

from .index import NgramIndex

MOST_PLACES = 8
TIMES_LIKELIER = 4.0  # a match, for each token that it is longer than another one

Match = tuple[int, float]
"""The place of the token that followed, and how much it counts."""


class BranchingIndex(NgramIndex):
    """Finds the continuations of several matches. Each place leads to the one before it.

    `_earlier` maps a place to the place before it that followed the same n-gram of `min_length`, 0 where there is none:
    8 bytes per token of text.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        super().__init__(min_length, max_length)
        self._earlier: list[int] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in token_ids:
            self._earlier.append(self._places.get(tuple(self._tokens[-self._min_length :]), 0))
            super().extend((token,))

    def tree(self, num_nodes: int, max_depth: int) -> Tree:
        """What followed the longest match and the most recent others, the likeliest first.

        The probability of a token is the share of the matches that it followed, by how much each counts. A continuation
        that reaches the end of the text goes on with its own beginning.
        """

        def children(state: tuple[list[Match], int]) -> Iterator[tuple[int, float, tuple[list[Match], int]]]:
            matches, depth = state
            total = sum(weight for _, weight in matches)
            followed: defaultdict[int, list[Match]] = defaultdict(list)
            for place, weight in matches:
                followed[self._copied(place, depth)].append((place, weight))
            shares = ((token, sum(weight for _, weight in each) / total, each) for token, each in followed.items())
            for token, share, each in sorted(shares, key=lambda found: -found[1]):
                yield token, share, (each, depth + 1)

        matches = self._matches()
        tree, _ = best_first(children, (matches, 0), num_nodes if matches else 0, max_depth)
        return tree

    def _matches(self) -> list[Match]:
        """The longest match first, then the most recent ones."""
        longest = self._match()
        if longest is None:
            return []
        places = {longest: None}
        place = self._places[tuple(self._tokens[-self._min_length :])]
        while place and len(places) < MOST_PLACES:
            places[place] = None
            place = self._earlier[place]
        most = self._length(longest)
        return [(each, TIMES_LIKELIER ** (self._length(each) - most)) for each in places]

    def _length(self, place: int) -> int:
        """How many tokens before a place equal the last ones of the text."""
        tokens, length = self._tokens, self._min_length
        while length < min(self._max_length, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _copied(self, place: int, depth: int) -> int:
        return self._tokens[place + depth % (len(self._tokens) - place)]
