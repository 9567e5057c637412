"""How likely reported drafts are accepted: the sum of min(p, q), as far as p was recorded.

A draft token drawn from q is accepted with probability sum over x of min(p(x), q(x)) (arXiv 2211.17192). The recording
holds p of the likeliest tokens and the mass of all others. So the sum is known up to the smaller of both tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.rejection.ratio import distribution_tables
from specdec.core.rejection.types import DraftDistributions, DraftRows

from ..recording import RecordedRequest


@dataclass
class Bounds:
    """Sums over the drafts at one position."""

    count: int = 0
    lower: float = 0.0
    upper: float = 0.0


class ExpectedAcceptance:
    """Expected acceptance by draft position, over drafts that match the recorded text up to there."""

    def __init__(self, top_m: int) -> None:
        self._top_m = top_m
        self.positions: list[Bounds] = []

    def record(self, drafts: DraftRows, rows: Sequence[tuple[RecordedRequest, int]], reached: Sequence[int]) -> None:
        """Count one step. rows: each request, and its number of output tokens. reached: positions that count."""
        assert drafts.distributions is not None, "there is nothing else to expect"
        for place in range(drafts.token_ids.shape[1]):
            chosen = [
                index
                for index, ((request, start), far) in enumerate(zip(rows, reached, strict=True))
                if place < min(far, int(drafts.lengths[index])) and start + place < len(request.token_ids)
            ]
            if chosen and self._top_m:
                self._count(place, chosen, drafts.distributions, rows)

    def _count(
        self,
        place: int,
        chosen: Sequence[int],
        distributions: DraftDistributions,
        rows: Sequence[tuple[RecordedRequest, int]],
    ) -> None:
        top_ids = torch.zeros(len(rows), self._top_m, dtype=torch.int64)
        for index in chosen:
            request, start = rows[index]
            top_ids[index] = request.top_ids[start + place]
        q_top = _probs(distributions, top_ids, place)
        while len(self.positions) <= place:
            self.positions.append(Bounds())
        for index in chosen:
            request, start = rows[index]
            p_top = request.top_logprobs[start + place].double().exp()
            lower = float(torch.minimum(p_top, q_top[index]).sum())
            tail = min(float(request.tail_mass[start + place]), max(1 - float(q_top[index].sum()), 0.0))
            bounds = self.positions[place]
            bounds.count, bounds.lower, bounds.upper = (
                bounds.count + 1,
                bounds.lower + lower,
                bounds.upper + lower + tail,
            )

    def rates(self) -> list[tuple[float, float]]:
        """Lower and upper bound of the acceptance at each position, given that what is before it was accepted."""
        return [(each.lower / each.count, each.upper / each.count) for each in self.positions if each.count]

    def tokens_per_step(self) -> tuple[float, float]:
        """Bounds of the tokens that a drafted step commits."""
        totals = []
        for side in (0, 1):
            total = product = 1.0
            for rate in self.rates():
                product *= rate[side]
                total += product
            totals.append(total)
        return totals[0], totals[1]


def _probs(distributions: DraftDistributions, token_ids: Tensor, place: int) -> Tensor:
    """q of token_ids [B, m] at one place: [B, m] float64. A one-hot row has none of its own and counts as 0."""
    wanted = torch.ones(len(token_ids), place + 1, dtype=torch.bool)
    places = torch.full((token_ids.shape[1],), place)
    total = torch.zeros(token_ids.shape, dtype=torch.float64)
    for kind, table in distribution_tables(distributions, wanted).items():
        of_kind = (distributions.kind == kind).cpu()[:, None]
        total = torch.where(of_kind, table.prob_of(token_ids, places).cpu(), total)
    return total
