"""What drawn drafts are expected to commit, whatever was drawn, as far as p was recorded.

A draft token drawn from q is accepted with probability sum over x of min(p(x), q(x)) (arXiv 2211.17192). The recording
holds p of the likeliest tokens and the mass of all others. So the sum is known up to the smaller of both tails.

That is said of one place, and a live step gets to place i by its drafts x_1, ..., x_i: it draws and accepts them with
probability product of min(p(x_j), q(x_j)). In a replay a step gets there if the drafts are the recorded text. The text
says them with probability product of p(x_j), and independently the proposer draws them with product of q(x_j). As
min(p, q) = p q / max(p, q), a step that gets there counts 1 / product of max(p(x_j), q(x_j)), and one that does not
counts 0. The mean of that over all drafted steps is, on average over texts and drafts, what a live step gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.rejection.ratio import distribution_tables
from specdec.core.rejection.types import NO_PROPOSAL, DraftRows

from ..recording import RecordedRequest


@dataclass
class Bounds:
    """Sums over the steps that got to one position."""

    weight: float = 0.0  # on average the number of live steps that get there
    lower: float = 0.0  # accepted there
    upper: float = 0.0


class ExpectedAcceptance:
    """Expected acceptance by draft position, from steps whose drafts match the recorded text up to there."""

    def __init__(self, top_m: int) -> None:
        self._top_m = top_m
        self.num_steps = 0  # that drafted
        self.positions: list[Bounds] = []

    def record(self, drafts: DraftRows, rows: Sequence[tuple[RecordedRequest, int]], reached: Sequence[int]) -> None:
        """Count one step. rows: each request, and its number of output tokens. reached: positions that count."""
        assert drafts.distributions is not None, "there is nothing else to expect"
        if not self._top_m:
            return
        lengths = drafts.lengths.tolist()
        self.num_steps += sum(length > 0 for length in lengths)
        weights = [1.0] * len(rows)
        for place in range(drafts.token_ids.shape[1]):
            chosen = [
                index
                for index, ((request, start), far) in enumerate(zip(rows, reached, strict=True))
                if place < min(far, lengths[index]) and start + place < len(request.token_ids)
                if int(drafts.token_ids[index, place]) != NO_PROPOSAL
            ]
            if chosen:
                self._count(place, chosen, drafts, rows, weights)

    def _count(
        self,
        place: int,
        chosen: Sequence[int],
        drafts: DraftRows,
        rows: Sequence[tuple[RecordedRequest, int]],
        weights: list[float],
    ) -> None:
        """Add what the chosen steps are expected to accept here, and take `weights` on to the next place."""
        said = torch.zeros(len(rows), 1 + self._top_m, dtype=torch.int64)  # the recorded token, and the likeliest ones
        for index in chosen:
            request, start = rows[index]
            said[index, 0], said[index, 1:] = request.token_ids[start + place], request.top_ids[start + place]
        probs = _probs(drafts, said, place)
        q_said, q_top = probs[:, 0], probs[:, 1:]
        while len(self.positions) <= place:
            self.positions.append(Bounds())
        bounds = self.positions[place]
        for index in chosen:
            request, start = rows[index]
            p_top = request.top_logprobs[start + place].double().exp()
            lower = float(torch.minimum(p_top, q_top[index]).sum())
            tail = min(float(request.tail_mass[start + place]), max(1 - float(q_top[index].sum()), 0.0))
            bounds.weight += weights[index]
            bounds.lower += weights[index] * lower
            bounds.upper += weights[index] * (lower + tail)
            weights[index] /= max(float(request.token_logprobs[start + place].double().exp()), float(q_said[index]))

    def rates(self) -> list[tuple[float, float]]:
        """Lower and upper bound of the acceptance at each position, given that what is before it was accepted."""
        return [(each.lower / each.weight, each.upper / each.weight) for each in self.positions if each.weight]

    def tokens_per_step(self) -> tuple[float, float]:
        """Bounds of the tokens that a drafted step commits."""
        steps = max(self.num_steps, 1)
        lower, upper = (sum(getattr(each, side) for each in self.positions) for side in ("lower", "upper"))
        return 1 + lower / steps, 1 + upper / steps


def _probs(drafts: DraftRows, token_ids: Tensor, place: int) -> Tensor:
    """q of token_ids [B, m] at one place: [B, m] float64. A one-hot row has all of it at its draft."""
    distributions = drafts.distributions
    assert distributions is not None, "the caller has asked"
    token_ids, drafted = (each.to(distributions.kind.device) for each in (token_ids, drafts.token_ids))
    wanted = torch.zeros_like(drafted, dtype=torch.bool)
    wanted[:, place] = True
    places = torch.full((token_ids.shape[1],), place)
    total = (token_ids == drafted[:, place, None]).double()
    for kind, table in distribution_tables(distributions, wanted).items():
        total = torch.where((distributions.kind == kind)[:, None], table.prob_of(token_ids, places), total)
    return total.cpu()
