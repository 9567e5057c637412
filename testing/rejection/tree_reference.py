"""Verification of trees, one request at a time, in float64, written to be read.

A rule asks `Chance` for its decisions, so everything that may happen can be enumerated. `core/rejection/tree.py` must
follow the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Nodes:
    """A tree, with p of each place [V], and of each node q that it was drawn from given all earlier nodes [V]."""

    parents: list[int]
    token_ids: list[int]
    p: list[Tensor]  # by place: one more than nodes
    q: list[Tensor]  # by node: earlier siblings are taken out where they were not put back

    def children(self, place: int) -> list[int]:
        return [node for node, parent in enumerate(self.parents) if parent + 1 == place]

    def path(self, place: int) -> list[int]:
        """Places from 0 to a place."""
        found = [place]
        while found[-1] > 0:
            found.append(self.parents[found[-1] - 1] + 1)
        return found[::-1]


class Chance(Protocol):
    """What happens by chance in one verification."""

    def accepts(self, node: int, probability: float) -> bool:
        """Whether a node, of which this is asked once at most, is accepted."""

    def draw(self, place: int, weights: Tensor) -> int:
        """The token that is emitted at a place, from weights [V]."""


TreeRule = Callable[[Nodes, Chance], tuple[int, int]]
"""(last place of the accepted path, token emitted there)"""


def coupled(nodes: Nodes, chance: Chance) -> tuple[int, int]:
    """Draw the target's token at a place, and go down if a child has it; q is not looked at."""
    place = 0
    while True:
        token = chance.draw(place, nodes.p[place])
        child = next((node for node in nodes.children(place) if nodes.token_ids[node] == token), None)
        if child is None:
            return place, token
        place = child + 1


def part(weight: float, p: Tensor, q: Tensor, token: int) -> tuple[float, float, Tensor]:
    """(the child's weight, the place's weight if it fails, p of the place then)."""
    left = (weight * p - q).clamp(min=0)
    mass = float(left.sum())
    child = min(1.0, weight * float(p[token]) / float(q[token])) if float(q[token]) > 0 else 0.0
    if not mass > 0:
        return child, 0.0, p
    return child, mass / (mass + (1 - weight)), left / mass  # in this order: mass + 1 may be 1


def multi_round(nodes: Nodes, chance: Chance) -> tuple[int, int]:
    """Walk from the root and try each child against what is left of p (arXiv 2305.09781, 2402.12374)."""
    place = 0
    while True:
        p = nodes.p[place]
        for child in nodes.children(place):
            accept, _, left = part(1.0, p, nodes.q[child], nodes.token_ids[child])
            if chance.accepts(child, accept):
                place = child + 1
                break
            p = left
        else:
            return place, chance.draw(place, p)


def traversal(nodes: Nodes, chance: Chance) -> tuple[int, int]:
    """Walk from the leaves: a place is decided when all below it have failed (arXiv 2505.12398)."""

    def visit(place: int, weight: float) -> tuple[int, int] | None:
        p = nodes.p[place]
        for child in nodes.children(place):
            below, weight, left = part(weight, p, nodes.q[child], nodes.token_ids[child])
            found = visit(child + 1, below)
            if found is not None:
                return found
            p = left
        return (place, chance.draw(place, p)) if place == 0 or chance.accepts(place - 1, weight) else None

    found = visit(0, 1.0)
    assert found is not None, "place 0 has weight 1"
    return found


class _Branch:
    """One run of the enumeration: `script` repeats the first decisions, the others take their first branch."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.prob = script, 1.0
        self.taken: list[int] = []
        self.others: list[list[int]] = []

    def accepts(self, node: int, probability: float) -> bool:
        return self._pick([1 - min(max(probability, 0.0), 1.0), min(max(probability, 0.0), 1.0)]) == 1

    def draw(self, place: int, weights: Tensor) -> int:
        return self._pick((weights / weights.sum()).tolist())

    def _pick(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        known = len(self.taken) < len(self.script)
        chosen = self.script[len(self.taken)] if known else possible[0]
        self.taken.append(chosen)
        self.others.append([i for i in possible if i != chosen])
        self.prob *= weights[chosen]
        return chosen


def outcomes(rule: TreeRule, nodes: Nodes) -> Iterator[tuple[int, int, float]]:
    """Every (place, token) that a rule may end with, and its probability."""
    waiting: list[list[int]] = [[]]
    while waiting:
        script = waiting.pop()
        branch = _Branch(script)
        place, token = rule(nodes, branch)
        yield place, token, branch.prob
        for depth in range(len(script), len(branch.taken)):
            waiting += [[*branch.taken[:depth], other] for other in branch.others[depth]]


def left_of(q: Tensor, earlier: Sequence[int]) -> Tensor:
    """q [V] without the tokens of earlier siblings, renormalised."""
    if not earlier:
        return q
    rest = q.index_fill(0, torch.tensor(earlier), 0.0)
    return rest / rest.sum()
