"""The exact distribution of a verifier of trees: the box of uniforms that gives each outcome, found by bisection.

Each decision of a rule reads a uniform of its own. So the uniforms that lead to one outcome, which is a place and the
token emitted there, are a box, and its volume is the outcome's probability. The specification says where sides should
end, and bisection finds where they end for the verifier. An end is searched from one of the boxes beside it, and every
box is met in its middle. All searches of a problem advance in one call of the verifier per iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.rejection import DistributionKind, Uniforms, Verdict
from specdec.testing.rejection.exact_distribution import ALMOST_ONE, ALMOST_ZERO
from specdec.testing.rejection.tree_reference import TreeRule

from .tree_problems import (
    Case,
    Decision,
    Model,
    Sketch,
    TreeBatch,
    batch_of,
    case_of,
    continued,
    outcomes_by_decisions,
    verified,
)

Verify = Callable[..., Verdict]
Wall = tuple[int, tuple[int, ...], float]
"""Where one decision turns into another: the tree, what was decided before, and where it should be."""


@dataclass(frozen=True)
class Precision:
    """How far from the specification a search begins, and when it ends."""

    near: float
    resolution: float


DOUBLE = Precision(1e-12, 2.0**-46)
SINGLE = Precision(2e-7, 2.0**-30)
INTERPRETED = Precision(1e-7, 2.0**-24)


class Drawn(NamedTuple):
    """A tree that a drafter may draw."""

    drafter: int
    sketch: Sketch
    prob: float


@dataclass(frozen=True)
class TreeProblem:
    """Every tree of several drafters, verified in one ragged batch, and what is reported of them."""

    rule: TreeRule
    trees: Sequence[Drawn]
    target: Model
    draft: Model
    kind: DistributionKind
    replacement: bool = False

    def batch(self, found: Sequence[tuple[int, Case]]) -> TreeBatch:
        """found: the number of each request's tree, and its uniforms."""
        pairs = [(self.trees[number].sketch, case) for number, case in found]
        dtype = self.target.dtype
        return batch_of(pairs, self.target, self.draft, self.kind, replacement=self.replacement, dtype=dtype)


@dataclass(frozen=True)
class Box:
    """One outcome of one tree."""

    tree: int
    sides: list[Decision]
    case: Case  # uniforms in the middle

    def walls(self, side: Decision) -> tuple[Wall, Wall]:
        return (self.tree, side.before, side.low), (self.tree, side.before, side.high)


@dataclass(frozen=True)
class Search:
    """A wall, as seen from one of the boxes beside it."""

    box: Box
    side: Decision
    is_low: bool  # whether the box begins there, or ends there


def variation_through(verify: Verify, problem: TreeProblem, precision: Precision) -> float:
    """The largest total variation of any drafter, between the next tokens by a verifier and those of the target."""
    boxes = list(_boxes(problem))
    middles = problem.batch([(box.tree, box.case) for box in boxes])
    assert verified(middles, verify) == middles.expected, "a box is not where the specification has it"
    walls = _walls(verify, problem, boxes, precision)
    alone = continued(problem.target, [])
    output = torch.zeros(1 + max(each.drafter for each in problem.trees), *alone.shape, dtype=torch.float64)
    for box in boxes:
        drafter, sketch, prob = problem.trees[box.tree]
        for side in box.sides:
            low, high = (walls.get(wall, wall[-1]) for wall in box.walls(side))
            prob *= high - low
        emitted = (*sketch.prefix(box.case.place), box.case.token)
        output[drafter, *emitted] += prob * continued(problem.target, emitted)
    return float((output - alone).abs().flatten(1).sum(1).max()) / 2


def _boxes(problem: TreeProblem) -> Iterator[Box]:
    for number, each in enumerate(problem.trees):
        for sides, place, token in outcomes_by_decisions(problem.rule, each.sketch.nodes(problem.target), least=1e-9):
            yield Box(number, sides, case_of(sides, place, token, {}))


def _walls(verify: Verify, problem: TreeProblem, boxes: Sequence[Box], precision: Precision) -> dict[Wall, float]:
    """Where the walls inside of 0 .. 1 are."""
    searches: dict[Wall, Search] = {}
    for box in boxes:
        for side in box.sides:
            for wall, is_low in zip(box.walls(side), (True, False), strict=True):
                if 0 < wall[-1] < 1:
                    searches.setdefault(wall, Search(box, side, is_low))
    found = _bisected(verify, problem, list(searches.values()), precision)
    return dict(zip(searches, found.tolist(), strict=True))


def _bisected(verify: Verify, problem: TreeProblem, searches: Sequence[Search], precision: Precision) -> Tensor:
    batch = problem.batch([(each.box.tree, each.box.case) for each in searches])
    is_low = torch.tensor([each.is_low for each in searches])
    low, high = torch.zeros(len(searches), dtype=torch.float64), torch.ones(len(searches), dtype=torch.float64)

    def narrow(at: Tensor) -> None:
        inside = verified(_moved(batch, searches, at), verify)
        is_inside = torch.tensor([found == expected for found, expected in zip(inside, batch.expected, strict=True)])
        is_below = is_inside != is_low
        low.copy_(torch.where(is_below, torch.maximum(low, at), low))
        high.copy_(torch.where(is_below, high, torch.minimum(high, at)))

    stated = torch.tensor([each.side.low if each.is_low else each.side.high for each in searches], dtype=torch.float64)
    for bound in (stated - precision.near, stated + precision.near):
        narrow(bound.clamp(ALMOST_ZERO, ALMOST_ONE))
    while float((high - low).max()) > precision.resolution:
        narrow((low + high) / 2)
    return (low + high) / 2


def _moved(batch: TreeBatch, searches: Sequence[Search], at: Tensor) -> TreeBatch:
    """With the uniforms that are searched in other places."""
    assert batch.uniforms.accept is not None
    tables = {"output": batch.uniforms.output.clone(), "accept": batch.uniforms.accept.clone()}
    for row, (each, value) in enumerate(zip(searches, at.tolist(), strict=True)):
        tables[each.side.table][row, each.side.index] = value
    return replace(batch, uniforms=Uniforms(tables["output"], tables["accept"]))
