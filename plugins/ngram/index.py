"""The n-grams of one growing text, and where each was last followed by a token."""

from __future__ import annotations

from collections.abc import Iterable


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
