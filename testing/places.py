"""Whether drafts are drawn from their reported distributions: a statistical test with a stated rate of false alarms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .compare import distributions_of
from .moves import Move
from .report import NotApplicable
from .stage import Stage

NUM_REQUESTS = 16
NUM_DRAWS = 2000
LONGEST = 150  # tokens of a request


@dataclass(frozen=True)
class Statement:
    """A figure, and what it may be by chance."""

    name: str
    found: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it is within."""
        return self.found <= self.limit


@dataclass(frozen=True)
class Sample:
    """The place of each drafted token in its distribution: a number between the mass before it and that mass plus its
    own.

    Drawn from that distribution it is uniform in (0, 1), whatever was drawn before. Two orders of the vocabulary are
    used, since drafters draw in either: a place is then the random number that drew the token.
    """

    by_rank: Tensor  # [N] float64, likely tokens first: a wrong temperature shifts them all one way
    by_id: Tensor  # [N] float64
    follows: Tensor  # [N] bool, the next draft of the same row as the one before
    positions: Tensor  # [N] int64, of each draft in its row

    def statements(self, rate: float) -> Iterator[Statement]:
        """What holds but for a probability of `rate`, shared by them all."""
        positions = sorted(set(self.positions.tolist()))
        share = rate / (3 + len(positions))
        yield _distance("distance from uniform", self.by_rank, share)
        for position in positions:  # a mistake in one of K is a K-th of all
            yield _distance(f"distance at draft {position}", self.by_rank[self.positions == position], share)
        num_pairs = max(int(self.follows.sum()), 1)
        limit = math.sqrt(2 * math.log(2 / share) / num_pairs) / 4
        for name, places in (("likely tokens first", self.by_rank), ("in the order of ids", self.by_id)):
            products = (places[1:] - 0.5) * (places[:-1] - 0.5)
            covariance = abs(float(products[self.follows[1:]].sum())) / num_pairs
            yield Statement(f"covariance of neighbours, {name}", covariance, limit)


def _distance(name: str, places: Tensor, rate: float) -> Statement:
    """How far numbers [N] are from uniform ones."""
    count = len(places)
    middles = (torch.arange(count) + 0.5) / count
    distance = float((places.sort().values - middles).abs().max()) + 0.5 / count
    return Statement(name, distance, math.sqrt(math.log(2 / rate) / (2 * count)))


def draw_places(stage: Stage) -> Sample:
    """Draw about 2000 drafts of requests that run side by side, sampled in several ways.

    Raises NotApplicable if none was drawn from a distribution.
    """
    generator = torch.Generator().manual_seed(stage.seed)
    names = [f"request-{number}" for number in range(NUM_REQUESTS)]
    for name in names:
        stage.add(name, 12)
    drafts: list[tuple[float, float, bool, int]] = []
    longest = 0
    while len(drafts) < NUM_DRAWS and longest < LONGEST:
        shown = stage.advance([Move(name) for name in names])
        longest = int(shown.view.committed_length.max())
        last = (-1, -1)
        for row, position, token, distribution in distributions_of(stage, shown):
            inside = distribution[token] * torch.rand((), generator=generator, dtype=torch.float64)
            before = distribution[:token].sum()
            above = (
                distribution[distribution > distribution[token]].sum()
                + distribution[:token][distribution[:token] == distribution[token]].sum()
            )
            follows = last == (row, position - 1)
            drafts.append((float(above + inside), float(before + inside), follows, position))
            last = (row, position)
    if not drafts:
        raise NotApplicable("no draft came with its distribution: see declared_distribution_is_reported")
    by_rank, by_id, following, positions = map(torch.tensor, zip(*drafts, strict=True))
    return Sample(by_rank.double(), by_id.double(), following, positions)
