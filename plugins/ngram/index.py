"""The n-grams of one growing text, and where each was last followed by a token, or for trees every time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from specdec.sdk.trees import Tree, best_first

MOST_PLACES = 8
TIMES_LIKELIER = 4.0  # a match, for each token that it is longer than another one

Match = tuple[int, float]
"""The place of the token that followed, and how much it counts."""


class NgramIndex:
    """Finds the longest suffix of a text that occurred in it before, without reading the text again.

    `_places` maps an n-gram to the position of the token that followed its most recent occurrence. An n-gram
    therefore enters when its follower arrives, and a suffix that is looked up never finds itself.

    n-grams of `min_length` are always stored, a longer one only where the (n-1)-gram that it ends with
    occurred twice: while that has a single occurrence, its place answers for every longer match as well. Text
    that does not repeat so costs one entry per token, whatever `max_length` is.

    Appending a token and looking up visit one n-gram per length from `min_length` to the length of the match,
    at most `max_length`, however long the text is. Memory at lengths 2 to 5: about 160 bytes per token of text.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        self._min_length = min_length
        self._max_length = max_length
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        """The number of tokens that were appended."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        tokens, places = self._tokens, self._places
        for token in token_ids:
            place = len(tokens)
            for length in range(self._min_length, min(self._max_length, place) + 1):
                ngram = tuple(tokens[place - length : place])
                earlier = places.get(ngram)
                places[ngram] = place
                if earlier is None:
                    break
                if length < self._max_length and length < earlier:
                    places.setdefault(tuple(tokens[earlier - length - 1 : earlier]), earlier)
            tokens.append(token)

    def continuation(self, num_tokens: int) -> list[int]:
        """What followed the most recent of the longest matches: `num_tokens` ids, or none without a match.

        Where the text ends first, the continuation goes on with its own beginning, as the overlapping copy of
        LZ77 does: the last tokens repeat those just before them, and may do so again.
        """
        place = self._match()
        if place is None:
            return []
        continuation = self._tokens[place : place + num_tokens]
        while len(continuation) < num_tokens:
            continuation += continuation[: num_tokens - len(continuation)]
        return continuation

    def _match(self) -> int | None:
        """The place after the most recent earlier occurrence of the longest suffix that has one."""
        tokens, places = self._tokens, self._places
        match = None
        for length in range(self._min_length, self._max_length + 1):
            place = places.get(tuple(tokens[-length:]))
            if place is None:
                break
            match = place
        return match


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
