"""How many draft tokens are worth a place in the next step, and how many are worth drafting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from ..proposing.calibration import RATE, Calibration, LearnedStop
from ..proposing.draft_store import DraftStore
from ..request.metrics import EngineMetrics
from ..request.request import Committed, Request
from .cost_curve import CostCurve

PROBE = 32  # steps between two that draft and verify all: what is never verified is never found worth it again
MEMORY = 0.8  # the weight of a request's verification, relative to the one after it
RATE_WEIGHT = 4.0  # tokens that the acceptance rate of a new request counts for
CHOICE_EVERY = 8  # steps between two choices of a depth and a price
SHARE, PROBE_SHARE = 1 / 16, 1 / 4  # of the newest step in the averages by position


class DraftBudget:
    """Verifies the draft tokens of a batch that earn more tokens per second than a step without them.

    A token's worth is its chance to be accepted: the product of the confidences up to it, calibrated. Its cost is the
    measured slope of a step's time. Tokens are admitted in the order of their worth over all requests, until the next
    one is worth less than its cost at the rate of those before it. arXiv 2607.05147 and vLLM's pull request 47808 size
    a batch in this way. How many tokens are drafted follows from what was worth it in earlier steps, and in each row
    from its confidences, where the proposer stops by them.

    Lossless: whether a token is admitted depends on tokens that are worth more, on those before it in its own draft,
    and on earlier steps. It never depends on itself, nor on what comes after it. So admission ends with the first token
    that is too dear, and does not look whether a later one would pay. What drafting took is counted when its drafts
    were verified, as it depends on when they stopped.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        running: Sequence[Request],
        drafts: DraftStore,
        metrics: EngineMetrics,
        *,
        may_stop: bool = False,
    ) -> None:
        """running: the requests that have a row, whenever it is looked at. may_stop: whether rows may stop early."""
        self.calibration = Calibration(num_draft_tokens)
        self.depth = num_draft_tokens  # the most tokens that are worth drafting for a request now
        self._most, self._running, self._drafts, self._metrics = num_draft_tokens, running, drafts, metrics
        self.stop_rule: LearnedStop | None = None  # of the drafts to be made now
        self.num_made = 0  # tokens, of the drafts that were made last
        self._may_stop, self._best_stop = may_stop, self.calibration.stop_rule(0.0)
        self._target, self._draft = CostCurve(), CostCurve()  # by rows, and by tokens drafted
        self._made: tuple[int, float] | None = None  # tokens and seconds of the drafts that wait
        self._waiting_depth = num_draft_tokens  # what was asked for when they were made
        self._averages = [(0.0, 0.0, 0.0, 0)] * num_draft_tokens  # by position: see `_average`, and steps
        self._best_depth, self._num_drafted = num_draft_tokens, float(num_draft_tokens)  # and tokens of each request
        self._recent: dict[Request, tuple[float, float]] = {}  # accepted and tested tokens, faded
        self._confidences: dict[Request, list[float]] = {}  # of the drafts that wait
        self._num_steps = 0

    def plan(self, num_drafts: Callable[[Request], int]) -> Callable[[Request], int]:
        """How many draft tokens of each request are verified, of those that `num_drafts` says it can use."""
        waiting = list(self._running)
        self._confidences = {each: self._confidences_of(each, num_drafts(each)) for each in waiting}
        worths = [self._worths(each) for each in waiting]
        lengths = list(map(len, worths))
        probed = self._probed_length()
        if waiting and self._knows_costs:
            worths = [each[: self._drafted_length(each)] for each in worths]
            admitted = self._admitted(sum(each.num_uncomputed_tokens for each in waiting), worths)
            count = sum(each.num_uncomputed_tokens == 1 for each in waiting)  # the others had no draft to wait for
            self._average(worths, admitted, max(count, 1), SHARE if probed is None else PROBE_SHARE)
            lengths = admitted if probed is None else lengths
        if probed is not None:
            lengths = [min(each, probed) for each in lengths]
        self._metrics.counts["num_unverified_draft_tokens"] += sum(map(len, self._confidences.values())) - sum(lengths)
        return dict(zip(waiting, lengths, strict=True)).__getitem__

    def learn(self, committed: Sequence[Committed], seconds: float, draft_seconds: float) -> None:
        """Count a step: its outcome, and its time where it computed no prompt."""
        self._learn_outcomes(committed)
        self.calibration.end_step()
        if self._made is not None:
            self._draft.record(*self._made)
        self._made, self._waiting_depth = None, self.depth
        if all(each.num_rows == each.num_drafted + 1 for each in committed):
            self._target.record(sum(each.num_rows for each in committed), seconds - draft_seconds)
            self._made = self.num_made, draft_seconds
        self._num_steps += 1
        self.depth = self._next_depth(len(committed))
        self.stop_rule = self._best_stop if self._may_stop and not self._tries_all else None

    def _learn_outcomes(self, committed: Sequence[Committed]) -> None:
        recent: dict[Request, tuple[float, float]] = {}
        for each in committed:
            accepted, tested = self._recent.get(each.request, (0.0, 0.0))
            if each.num_drafted:
                self.calibration.record(self._confidences[each.request][: each.num_drafted], each.num_accepted)
                accepted = MEMORY * accepted + each.num_accepted
                tested = MEMORY * tested + min(each.num_accepted + 1, each.num_drafted)
            recent[each.request] = accepted, tested
        self._recent = recent

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

    @property
    def _tries_all(self) -> bool:
        """Whether drafts are made whole, to find out what their last tokens are worth."""
        return self._explores or self._num_steps % PROBE == 0

    def _next_depth(self, num_requests: int) -> int:
        if self._explores:
            return self._most if self._num_steps % 2 else 1 + self._num_steps // 2 % self._most
        if self._num_steps % CHOICE_EVERY == 0:
            self._choose(num_requests)
        return self._most if self._tries_all else self._best_depth

    def _choose(self, num_requests: int) -> None:
        """The depth of the highest rate of tokens, and the price of a token, from the averages, which move slowly."""
        worths, rows, drafted, _ = (list(each) for each in zip(*self._averages, strict=True))
        columns = accumulate([1.0, *worths]), accumulate([1.0, *rows]), accumulate([0.0, *drafted])
        totals = list(zip(*columns, strict=True))  # by depth
        rates = [tokens / self._seconds(rows, drafted, num_requests) for tokens, rows, drafted in totals]
        best = max(range(len(rates)), key=rates.__getitem__)
        self._best_depth = self._most if best and self._may_stop else best  # rows that stop need no common depth
        self._num_drafted = totals[self._best_depth][2]
        if self._may_stop:
            _, best_rows, best_drafted = totals[best]
            cost = self._target.slope(best_rows * num_requests) + self._draft.slope(best_drafted * num_requests)
            self._best_stop = self.calibration.stop_rule(rates[best] * num_requests * cost)

    def _seconds(self, rows: float, drafted: float, num_requests: int) -> float:
        """rows, drafted: of each request."""
        whole = self._target.seconds(rows * num_requests) + self._draft.seconds(drafted * num_requests)
        return max(whole, 1e-9)

    def _drafted_length(self, worths: Sequence[float]) -> int:
        """How many of the tokens would have been drafted by the newest rule: in some steps all of them are."""
        pairs = zip(worths[:-1], self._best_stop.least, strict=False)
        return next((length for length, (worth, least) in enumerate(pairs, start=1) if worth < least), len(worths))

    def _confidences_of(self, request: Request, num_drafts: int) -> list[float]:
        """The proposer's confidences; where it cannot tell, how often the request's drafts were accepted of late."""
        if not num_drafts:
            return []
        accepted, tested = self._recent.get(request, (0.0, 0.0))
        own = (accepted + RATE * RATE_WEIGHT) / (tested + RATE_WEIGHT)
        report = self._drafts.report(request.row)
        told = report.confidence[:num_drafts] if report else ()
        return [own if math.isnan(each) else each for each in told] if told else [own] * num_drafts

    def _worths(self, request: Request) -> list[float]:
        """Of a request's tokens, one after the other; a worth never rises."""
        confidences = self._confidences[request]
        return list(accumulate(map(self.calibration.probability, range(len(confidences)), confidences), mul))

    def _admitted(self, rows: int, worths: Sequence[Sequence[float]]) -> list[int]:
        """rows: those that are computed in any case."""
        lengths = [0] * len(worths)
        tokens, seconds = float(len(worths)), self._seconds(rows / len(worths), self._num_drafted, len(worths))
        tokens_in_order = sorted((-worth, i, b) for b, each in enumerate(worths) for i, worth in enumerate(each))
        for less, position, b in tokens_in_order:  # a worth never rises within a draft, so a draft's order is kept
            cost = self._target.slope(rows)
            if -less * seconds < tokens * cost:
                break
            rows, tokens, seconds, lengths[b] = rows + 1, tokens - less, seconds + cost, position + 1
        return lengths

    def _average(
        self, worths: Sequence[Sequence[float]], lengths: Sequence[int], num_requests: int, share: float
    ) -> None:
        """Move the averages over requests of the positions that were asked for: worth and number admitted, number
        drafted.
        """
        for position in range(self._waiting_depth):
            admitted = [each[position] for each, n in zip(worths, lengths, strict=True) if position < n]
            drafted = sum(position < len(each) for each in worths)
            new = [each / num_requests for each in (sum(admitted), len(admitted), drafted)]
            *old, steps = self._averages[position]
            part = max(share, 1 / (steps + 1))
            worth, number, made = (was + part * (now - was) for was, now in zip(old, new, strict=True))
            self._averages[position] = worth, number, made, steps + 1
