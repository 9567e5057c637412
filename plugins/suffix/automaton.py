"""A suffix automaton of growing text that counts what follows each of its substrings."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

ROOT = 0  # the state of the empty string
NOWHERE = -1  # no state
SEPARATOR = -2  # stands between texts; no token id, so no match crosses it


class Place(NamedTuple):
    """A string that occurs in the text: its state, and its length."""

    state: int
    length: int


START = Place(ROOT, 0)


class SuffixAutomaton:
    """Knows, for every string of at most `depth` tokens, how often it occurred and which token followed most often.

    A state is a set of strings that end at the same positions of the text; its suffix link leads to the longest
    suffix of them that also ends elsewhere (Blumer et al. 1985, The smallest automaton recognizing the subwords of a
    text). There are at most two states per token. Counts are kept for strings of at most `depth` + 1 tokens, so that
    appending a token is amortised O(depth) at the worst and O(length of the match) as a rule, however long the text is.

    Memory: six 32-bit numbers per state, and a dictionary for the states that several tokens follow.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._length = array("i")  # of the longest string of each state
        self._link = array("i")
        self._count = array("i")  # occurrences
        self._last = array("i")  # where the latest occurrence ends
        self._best = array("i")  # the follower that came most often, the latest of equals
        self._best_state = array("i")  # where it leads
        self._followers: dict[int, dict[int, int]] = {}  # all followers of a state that has several
        self._end = 0
        self._whole = self._add_state(0)  # the whole text's
        self._tail = START

    def __len__(self) -> int:
        """The number of tokens that were appended, separators included."""
        return self._end

    @property
    def tail(self) -> Place:
        """The text's last `depth` tokens."""
        return self._tail

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in token_ids:
            before = self._tail
            self._append(token)
            self._count_tail(before, token)

    def separate(self) -> None:
        """End a text and begin another one."""
        self.extend((SEPARATOR,))

    def advance(self, place: Place, token: int) -> Place:
        """The longest suffix of the string at `place` and `token`, of at most `depth` tokens, that the text has."""
        state, length = self._settled(place)
        following = self._next(state, token)
        while following == NOWHERE and state != ROOT:
            state = self._link[state]
            length = self._length[state]
            following = self._next(state, token)
        return START if following == NOWHERE else self._within_depth(following, length + 1)

    def contexts(self, place: Place) -> Iterator[Place]:
        """The suffixes of a place's string that something followed, longest first, one per set of occurrences."""
        state, length = self._settled(place)
        while state != ROOT:
            if self._num_followed(state):
                yield Place(state, length)
            state = self._link[state]
            length = self._length[state]

    def draft(self, context: Place, num_tokens: int, min_prob: float) -> tuple[list[int], float]:
        """The likeliest continuation of a context, token by token, and the number of tokens it expects to be right.

        The probability of a token is the share of the context's occurrences that it followed. Drafting ends after
        `num_tokens`, or where the probability of the whole continuation falls below `min_prob`. Where a context
        occurred at the end of the text only, its longest suffix that was followed by something is taken in its place:
        so the continuation of a text that loops goes round the loop.
        """
        draft: list[int] = []
        expected, prob = 0.0, 1.0
        state, length = context
        while len(draft) < num_tokens:
            while state != ROOT and (followed := self._num_followed(state)) == 0:
                state = self._link[state]
                length = self._length[state]
            token = self._best[state]
            if state == ROOT or token == SEPARATOR:
                break
            following = self._best_state[state]
            prob *= self._count[following] / followed
            if prob < min_prob:
                break
            draft.append(token)
            expected += prob
            state, length = self._within_depth(following, length + 1)
        return draft, expected

    def followers(self, place: Place) -> list[tuple[int, float, Place]]:
        """The tokens that followed a place's string, with their shares and the places after them, the most often first.

        Where the string occurred at the end of the text only, its longest suffix that was followed by something is
        taken in its place.
        """
        state, length = place
        while state != ROOT and (followed := self._num_followed(state)) == 0:
            state = self._link[state]
            length = self._length[state]
        if state == ROOT:
            return []
        every = self._followers.get(state) or {self._best[state]: self._best_state[state]}
        found = [
            (token, self._count[following] / followed, self._within_depth(following, length + 1))
            for token, following in every.items()
            if token != SEPARATOR
        ]
        return sorted(found, key=lambda each: (each[1], each[0] == self._best[state]), reverse=True)

    def _num_followed(self, state: int) -> int:
        """How many of a state's occurrences are followed by a token: all but one at the very end."""
        return self._count[state] - (self._last[state] == self._end)

    def _append(self, token: int) -> None:
        """The automaton's own step: a state for the whole text, and a copy of one whose strings part here."""
        new = self._add_state(self._length[self._whole] + 1)
        state, following = self._whole, NOWHERE
        while state != NOWHERE and (following := self._next(state, token)) == NOWHERE:
            self._set_next(state, token, new)
            state = self._link[state]
        if state == NOWHERE:
            self._link[new] = ROOT
        elif self._length[following] == self._length[state] + 1:
            self._link[new] = following
        else:
            copied = self._copy_state(following, self._length[state] + 1)
            while state != NOWHERE and self._next(state, token) == following:
                self._set_next(state, token, copied)
                state = self._link[state]
            self._link[following] = self._link[new] = copied
        self._whole = new
        self._end += 1

    def _count_tail(self, before: Place, token: int) -> None:
        """Count one more occurrence of the tail with `token`, and `token` as a follower of the tail before it."""
        count, link = self._count, self._link
        parent, length = self._settled(before)
        grown = state = self._next(parent, token)
        while state != ROOT:
            count[state] += 1
            self._last[state] = self._end
            state = link[state]
        while parent != ROOT:
            following = self._next(parent, token)
            if count[following] >= count[self._best_state[parent]]:
                self._best[parent], self._best_state[parent] = token, following
            parent = link[parent]
        self._tail = self._within_depth(grown, length + 1)

    def _settled(self, place: Place) -> Place:
        """The place again: its string may have moved to a copy of its state since it was found."""
        state, length = place
        while state != ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return Place(state, length)

    def _within_depth(self, state: int, length: int) -> Place:
        """The suffix of at most `depth` tokens of a string that is at most one token longer."""
        if length <= self._depth:
            return Place(state, length)
        link = self._link[state]
        return Place(link if self._length[link] >= self._depth else state, self._depth)

    def _next(self, state: int, token: int) -> int:
        if self._best[state] == token:
            return self._best_state[state]
        followers = self._followers.get(state)
        return NOWHERE if followers is None else followers.get(token, NOWHERE)

    def _set_next(self, state: int, token: int, following: int) -> None:
        best = self._best[state]
        if state in self._followers:
            self._followers[state][token] = following
        elif self._best_state[state] != NOWHERE and best != token:
            self._followers[state] = {best: self._best_state[state], token: following}
        if self._best_state[state] == NOWHERE or best == token:
            self._best[state], self._best_state[state] = token, following

    def _add_state(self, length: int) -> int:
        self._length.append(length)
        for column in (self._link, self._best, self._best_state):
            column.append(NOWHERE)
        for column in (self._count, self._last):
            column.append(0)
        return len(self._length) - 1

    def _copy_state(self, state: int, length: int) -> int:
        copied = self._add_state(length)
        for column in (self._link, self._count, self._last, self._best, self._best_state):
            column[copied] = column[state]
        if state in self._followers:
            self._followers[copied] = dict(self._followers[state])
        return copied
