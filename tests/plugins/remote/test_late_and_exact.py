"""What the delivery of drafts may depend on: every way in which a draft can be late, in exact fractions.

Vocabulary 3. A draft x1 x2 is drawn from q and verified by the rule of arXiv 2211.17192, or reported one-hot. A way
says which of its tokens are there when they are verified. Its first two output tokens have to follow p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction as F
from itertools import product

import pytest

TOKENS = range(3)
P1, Q1 = [F(1, 2), F(3, 10), F(1, 5)], [F(1, 5), F(1, 5), F(3, 5)]
P2 = [[F(1, 10), F(3, 5), F(3, 10)], [F(1, 2), F(1, 4), F(1, 4)], [F(1, 3), F(1, 3), F(1, 3)]]  # by the token before
Q2 = [[F(2, 5), F(1, 5), F(2, 5)], [F(1, 5), F(2, 5), F(2, 5)], [F(3, 5), F(1, 5), F(1, 5)]]
TARGET = {(y, z): P1[y] * P2[y][z] for y, z in product(TOKENS, TOKENS)}

Row = list[F]
Delivery = Callable[[int, int], Mapping[int, F]]
"""The number of tokens of the draft x1, x2 that are in time, with its probabilities."""


@dataclass(frozen=True)
class Way:
    """How a draft comes."""

    in_time: Delivery
    later: Callable[[int, int], bool] = lambda x1, x2: False
    """Whether what was late is there in the step behind, to be re-based where its first token was committed."""
    one_hot: bool = False


def verified(p: Row, q: Row, drawn: int) -> Iterator[tuple[int, F, bool]]:
    """Tokens with their probabilities, and whether the draft was accepted."""
    kept = min(F(1), p[drawn] / q[drawn])
    yield drawn, kept, True
    rest = [max(F(0), mine - its) for mine, its in zip(p, q, strict=True)]
    for token in TOKENS:
        if rest[token]:
            yield token, (1 - kept) * rest[token] / sum(rest), False


def first_two(way: Way) -> Counter[tuple[int, int]]:
    """The probabilities of the first two output tokens."""
    found: Counter[tuple[int, int]] = Counter()
    for x1, x2 in product(TOKENS, TOKENS):
        told1, told2 = Q1, Q2[x1]
        if way.one_hot:
            told1, told2 = ([F(token == drawn) for token in TOKENS] for drawn in (x1, x2))
        for num_tokens, chance in way.in_time(x1, x2).items():
            chance *= Q1[x1] * Q2[x1][x2]
            plain = [(token, P1[token], False) for token in TOKENS]
            for y, c, accepted in verified(P1, told1, x1) if num_tokens else plain:
                rebased = not num_tokens and y == x1 and way.later(x1, x2)
                second = verified(P2[y], told2, x2) if (num_tokens == 2 and accepted) or rebased else None
                for z, d, *_ in second or [(token, P2[y][token]) for token in TOKENS]:
                    found[y, z] += chance * c * d
    return found


def prepared_ahead(is_prepared: Callable[[int, int], bool], is_delivered: Callable[[int], bool]) -> Counter:
    """One draft a step: x1, and behind its outcome the next. is_prepared: for x1 and y, which took its place.

    The draft that was prepared is x2, and `is_delivered` says whether it comes.
    """
    found: Counter[tuple[int, int]] = Counter()
    for x1 in TOKENS:
        for y, c, accepted in verified(P1, Q1, x1):
            chance = Q1[x1] * c
            for x2 in TOKENS:
                comes = not accepted and is_prepared(x1, y) and is_delivered(x2)
                drawn = verified(P2[y], Q2[y], x2) if comes else ((z, P2[y][z], False) for z in TOKENS)
                for z, d, _ in drawn:
                    found[y, z] += chance * Q2[y][x2] * d
    return found


def distance(found: Mapping[tuple[int, int], F]) -> F:
    """Total variation."""
    assert sum(found.values()) == 1
    return sum((abs(found[pair] - TARGET[pair]) for pair in TARGET), F(0)) / 2


ALL, NONE, HALF = {2: F(1)}, {0: F(1)}, F(1, 2)
EXACT = {
    "always in time": Way(lambda x1, x2: ALL),
    "late by chance": Way(lambda x1, x2: {2: HALF, 0: HALF}),
    "late by chance, then re-based": Way(lambda x1, x2: {2: HALF, 0: HALF}, lambda x1, x2: True),
    "cut by chance": Way(lambda x1, x2: {2: HALF, 1: HALF}),
    "always late, then re-based": Way(lambda x1, x2: NONE, lambda x1, x2: True),
    "token by token, the second late because of the first": Way(lambda x1, x2: {1: F(1)} if x1 == 2 else ALL),
    "late, and there for re-basing because of its first token": Way(lambda x1, x2: NONE, lambda x1, x2: x1 != 2),
}
BIASED = {
    "late because of its first token": (Way(lambda x1, x2: NONE if x1 == 2 else ALL), 0.080),
    "its second token late because of itself": (Way(lambda x1, x2: {1: F(1)} if x2 == 1 else ALL), 0.073),
    "late, and there for re-basing because of its second token": (
        Way(lambda x1, x2: NONE, lambda x1, x2: x2 != 1),
        0.033,
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_ways_that_leave_the_distribution_as_it_is(name) -> None:
    assert distance(first_two(EXACT[name])) == 0


@pytest.mark.parametrize("name", BIASED)
def test_ways_that_do_not_are_found(name) -> None:
    way, expected = BIASED[name]
    assert float(distance(first_two(way))) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("rebased", [False, True])
def test_reported_one_hot_every_way_is_exact(name, rebased) -> None:
    way, _ = BIASED[name]
    later = (lambda x1, x2: True) if rebased else way.later
    assert distance(first_two(Way(way.in_time, later, one_hot=True))) == 0


def test_a_draft_that_was_prepared_may_be_used_where_its_outcome_happens() -> None:
    """Whichever outcomes were guessed: what was drafted, and what is committed, are known before the next is drawn."""
    for guesses in product([False, True], repeat=9):
        assert distance(prepared_ahead(lambda x1, y, guesses=guesses: guesses[3 * x1 + y], lambda x2: True)) == 0


def test_a_draft_that_was_prepared_may_not_be_dropped_because_of_what_was_drawn() -> None:
    found = [distance(prepared_ahead(lambda x1, y: True, lambda x2, slow=slow: x2 != slow)) for slow in TOKENS]
    assert any(found)
