"""How many draft tokens are worth a place in the next step, and how many are worth drafting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import mul

from ..proposing.calibration import Calibration
from ..proposing.draft_store import DraftStore
from ..request.metrics import EngineMetrics
from ..request.request import Committed, Request
from .cost_curve import CostCurve

PROBE = 32  # steps between two that draft and verify all: what is never verified is never found worth it again
MEMORY = 0.8  # the weight of a request's verification, relative to the one after it
RATE, RATE_WEIGHT = 0.7, 4.0  # the acceptance rate of a new request, and how many tokens it counts for
DEPTH_EVERY = 8  # steps between two choices of a depth
SHARE, PROBE_SHARE = 1 / 16, 1 / 4  # of the newest step in the averages by position


class DraftBudget:
    """Verifies the draft tokens of a batch that earn more tokens per second than a step without them.

    A token's worth is its chance to be accepted: the product of the confidences up to it, calibrated. Its cost is the
    measured slope of a step's time. Tokens are admitted in the order of their worth over all requests, until the next
    one is worth less than its cost at the rate of those before it. arXiv 2607.05147 and vLLM's pull request 47808 size
    a batch in this way. How many tokens are drafted follows from what was worth it in earlier steps.

    Lossless: whether a token is admitted depends on tokens that are worth more, on those before it in its own draft,
    and on earlier steps. It never depends on itself, nor on what comes after it. So admission ends with the first token
    that is too dear, and does not look whether a later one would pay.
    """

    def __init__(
        self, num_draft_tokens: int, running: Sequence[Request], drafts: DraftStore, metrics: EngineMetrics
    ) -> None:
        """running: the requests that have a row, whenever it is looked at."""
        self.calibration = Calibration(num_draft_tokens)
        self.depth = num_draft_tokens  # the most tokens that are worth drafting for a request now
        self._most, self._running, self._drafts, self._metrics = num_draft_tokens, running, drafts, metrics
        self._target, self._draft = CostCurve(), CostCurve()  # by rows, and by tokens drafted
        self._averages = [(0.0, 0.0, 0)] * num_draft_tokens  # by position: worth and number admitted, and steps
        self._best_depth = num_draft_tokens
        self._recent: dict[Request, tuple[float, float]] = {}  # accepted and tested tokens, faded
        self._confidences: dict[Request, list[float]] = {}  # of the drafts that wait
        self._num_steps = 0

    def plan(self, num_drafts: Callable[[Request], int]) -> Callable[[Request], int]:
        """How many draft tokens of each request are verified, of those that `num_drafts` says it can use."""
        waiting = list(self._running)
        self._confidences = {each: self._confidences_of(each, num_drafts(each)) for each in waiting}
        worths = [self._worths(each) for each in self._confidences.values()]
        lengths = list(map(len, worths))
        probed = self._probed_length()
        if waiting and self._knows_costs:
            admitted = self._admitted(sum(each.num_uncomputed_tokens for each in waiting), worths)
            self._average(worths, admitted, SHARE if probed is None else PROBE_SHARE)
            lengths = admitted if probed is None else lengths
        if probed is not None:
            lengths = [min(each, probed) for each in lengths]
        self._metrics.counts["num_unverified_draft_tokens"] += sum(map(len, worths)) - sum(lengths)
        return dict(zip(waiting, lengths, strict=True)).__getitem__

    def learn(self, committed: Sequence[Committed], seconds: float, draft_seconds: float) -> None:
        """Count a step: its outcome, and its time where it computed no prompt."""
        recent: dict[Request, tuple[float, float]] = {}
        for each in committed:
            accepted, tested = self._recent.get(each.request, (0.0, 0.0))
            if each.num_drafted:
                self.calibration.record(self._confidences[each.request][: each.num_drafted], each.num_accepted)
                accepted = MEMORY * accepted + each.num_accepted
                tested = MEMORY * tested + min(each.num_accepted + 1, each.num_drafted)
            recent[each.request] = accepted, tested
        self._recent = recent
        self.calibration.end_step()
        if all(each.num_rows == each.num_drafted + 1 for each in committed):
            self._target.record(sum(each.num_rows for each in committed), seconds - draft_seconds)
            self._draft.record(self.depth * len(committed), draft_seconds)
        self._num_steps += 1
        self.depth = self._next_depth(len(committed))

    @property
    def _knows_costs(self) -> bool:
        return self._target.is_known and self._draft.is_known

    def _probed_length(self) -> int | None:
        """A length for every draft, to find out what rows cost. None: it follows from worth and cost."""
        if self._num_steps % PROBE == 1:
            return self._most
        return self._num_steps % (self._most + 1) if self._explores else None

    @property
    def _explores(self) -> bool:
        """In the first steps drafts of all lengths are verified, then made."""
        return self._num_steps <= 2 * self._most or not self._knows_costs

    def _next_depth(self, num_requests: int) -> int:
        """That of the highest rate of tokens, from the averages, which move slowly."""
        if self._explores:
            return self._most if self._num_steps % 2 else 1 + self._num_steps // 2 % self._most
        if self._num_steps % DEPTH_EVERY == 0:
            worths, rows = ([1.0, *each] for each in list(zip(*self._averages, strict=True))[:2])
            totals = enumerate(zip(accumulate(worths), accumulate(rows), strict=True))
            rates = [tokens / self._seconds(rows, depth, num_requests) for depth, (tokens, rows) in totals]
            self._best_depth = max(range(len(rates)), key=rates.__getitem__)
        return self._most if self._num_steps % PROBE == 0 else self._best_depth

    def _seconds(self, rows: float, depth: int, num_requests: int) -> float:
        whole = self._target.seconds(rows * num_requests) + self._draft.seconds(depth * num_requests)
        return max(whole, 1e-9)

    def _confidences_of(self, request: Request, num_drafts: int) -> list[float]:
        """The proposer's confidences; where it cannot tell, how often the request's drafts were accepted of late."""
        if not num_drafts:
            return []
        accepted, tested = self._recent.get(request, (0.0, 0.0))
        own = (accepted + RATE * RATE_WEIGHT) / (tested + RATE_WEIGHT)
        told = self._drafts.confidence(request.row)[:num_drafts]
        return [own if math.isnan(each) else each for each in told] if told else [own] * num_drafts

    def _worths(self, confidences: Sequence[float]) -> list[float]:
        return list(accumulate(map(self.calibration.probability, range(len(confidences)), confidences), mul))

    def _admitted(self, rows: int, worths: Sequence[Sequence[float]]) -> list[int]:
        """rows: those that are computed in any case."""
        lengths = [0] * len(worths)
        tokens, seconds = float(len(worths)), self._seconds(rows / len(worths), self.depth, len(worths))
        heap = [(-each[0], 0, b) for b, each in enumerate(worths) if each]
        heapify(heap)
        while heap:
            worth, position, b = -heap[0][0], *heap[0][1:]
            cost = self._target.slope(rows)
            if worth * seconds < tokens * cost:
                break
            heappop(heap)
            rows, tokens, seconds, lengths[b] = rows + 1, tokens + worth, seconds + cost, position + 1
            if position + 1 < len(worths[b]):
                heappush(heap, (-worths[b][position + 1], position + 1, b))
        return lengths

    def _average(self, worths: Sequence[Sequence[float]], lengths: Sequence[int], share: float) -> None:
        """Move the averages of the positions that were drafted."""
        count = sum(1 for each in worths if each)
        for position in range(max(map(len, worths), default=0)):
            admitted = [each[position] for each, n in zip(worths, lengths, strict=True) if position < n]
            new = sum(admitted) / count, len(admitted) / count
            worth, number, steps = self._averages[position]
            part = max(share, 1 / (steps + 1))
            self._averages[position] = worth + part * (new[0] - worth), number + part * (new[1] - number), steps + 1
