"""From what a proposer says of a draft token to how often such tokens are accepted: learned while requests run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_BINS = 10
WEIGHT = 8.0  # tokens that the estimate of all positions counts for at one position, and the confidence itself for all
DECAY = 0.9  # of all counts, at each refresh
REFRESH = 16  # steps
RATE = 0.7  # the acceptance rate where nothing was verified yet


@dataclass
class Bin:
    """Tokens that were verified with a confidence between two tenths."""

    count: float = 0.0
    accepted: float = 0.0
    confidence: float = 0.0  # summed, as the proposer gave it
    expected: float = 0.0  # summed, as it was calibrated

    def add(self, accepted: bool, confidence: float, expected: float) -> None:
        self.count += 1
        self.accepted += accepted
        self.confidence += confidence
        self.expected += expected


@dataclass(frozen=True)
class LearnedStop:
    """The engine's `StopRule`: the product of a row's calibrated confidences, against a price by position."""

    probabilities: Sequence[Sequence[float]]  # by position and bin
    least: Sequence[float]  # by position: the least product up to there with which the next token pays

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """See `StopRule`. NaN counts as 1."""
        worth = 1.0
        for position, each in enumerate(confidence):
            worth *= 1.0 if math.isnan(each) else self.probabilities[position][_bin(each)]
        return worth >= self.least[len(confidence) - 1]


class Calibration:
    """A map of confidences for each draft position: monotone, and at first the identity.

    A token counts as seen if those before it were accepted. Counts fade, so the map follows the text. What it is at a
    step was learned of earlier steps alone, so it depends on no token that this step drew.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self.bins = [Bin() for _ in range(NUM_BINS)]  # since the start, all positions
        self._counts = [[[0.0, 0.0] for _ in range(NUM_BINS)] for _ in range(num_draft_tokens)]  # seen, accepted
        self._steps = 0
        self._map: list[list[float]] = []
        self._rates: list[float] = []  # of acceptance by position, of tokens that were verified
        self._refresh()

    def probability(self, position: int, confidence: float) -> float:
        """How likely the token at a position is to be accepted, given that those before it were."""
        return self._map[position][_bin(confidence)]

    def stop_rule(self, price: float) -> LearnedStop:
        """Stops before a token whose expected worth is below `price`; it is not known yet, so its position's counts."""
        return LearnedStop(self._map, [price / each for each in [*self._rates[1:], 1.0]])

    def record(self, confidences: list[float], num_accepted: int) -> None:
        """Count a verified draft, a confidence for each of its tokens."""
        for position, confidence in enumerate(confidences[: num_accepted + 1]):
            self.count(position, confidence, accepted=position < num_accepted)

    def count(self, position: int, confidence: float, *, accepted: bool) -> None:
        """Count a token of a verified draft, all before it having been accepted."""
        cell = self._counts[position][_bin(confidence)]
        cell[0] += 1
        cell[1] += accepted
        expected = self.probability(position, confidence)
        self.bins[_bin(confidence)].add(accepted, confidence, expected)

    @property
    def errors(self) -> tuple[float, float]:
        """The expected calibration error of what the proposer told, and of what was made of it (arXiv 1706.04599)."""
        count = sum(each.count for each in self.bins) or 1.0
        told = sum(abs(each.confidence - each.accepted) for each in self.bins)
        return told / count, sum(abs(each.expected - each.accepted) for each in self.bins) / count

    def end_step(self) -> None:
        """Make the map anew now and then."""
        self._steps += 1
        if self._steps % REFRESH == 0:
            self._refresh()

    def _refresh(self) -> None:
        middles = [(index + 0.5) / NUM_BINS for index in range(NUM_BINS)]
        whole = [
            _mean(sum(seen for seen, _ in cells), sum(accepted for _, accepted in cells), prior)
            for cells, prior in zip(zip(*self._counts, strict=True), middles, strict=True)
        ]
        self._map, self._rates = [], []
        for cells in self._counts:
            self._rates.append(_mean(sum(seen for seen, _ in cells), sum(accepted for _, accepted in cells), RATE))
            values = [_mean(seen, accepted, prior) for (seen, accepted), prior in zip(cells, whole, strict=True)]
            self._map.append(rising(values, [cell[0] + WEIGHT for cell in cells]))
            for cell in cells:
                cell[:] = [DECAY * cell[0], DECAY * cell[1]]


def rising(values: list[float], weights: list[float]) -> list[float]:
    """The closest values that never fall, by weighted squares (pool adjacent violators)."""
    pools: list[list[float]] = []  # value, weight, count
    for value, weight in zip(values, weights, strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            last = pools.pop()
            into = pools[-1]
            total = into[1] + last[1]
            into[:] = [(into[0] * into[1] + last[0] * last[1]) / total, total, into[2] + last[2]]
    return [value for value, _, count in pools for _ in range(int(count))]


def _bin(confidence: float) -> int:
    return min(max(int(confidence * NUM_BINS), 0), NUM_BINS - 1)


def _mean(seen: float, accepted: float, prior: float) -> float:
    return (accepted + WEIGHT * prior) / (seen + WEIGHT)
