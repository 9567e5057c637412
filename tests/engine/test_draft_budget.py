"""How many drafts are verified: by worth and cost, never by a token itself or what comes after it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from engine_helpers import GREEDY, counter, tokens
from inside import budget_of as budget_in

from specdec import LLM
from specdec.core.proposing.calibration import REFRESH, Calibration, rising
from specdec.core.proposing.draft_table import DraftReport
from specdec.core.request.metrics import EngineMetrics
from specdec.core.runner.cost_curve import CostCurve
from specdec.core.runner.draft_budget import DraftBudget

K, NAN = 4, math.nan


def test_one_measurement_has_no_slope():
    curve = CostCurve()
    curve.record(8, 1.0)
    assert not curve.is_known
    curve.record(64, 1.0)
    assert curve.is_known
    assert curve.slope(8) == 0


def test_the_curve_rises_is_convex_and_goes_straight_on():
    curve = CostCurve()
    for rows, seconds in ((8, 1.0), (16, 1.0), (32, 4.0), (64, 3.0), (128, 7.0), (256, 6.0)):
        curve.record(rows, seconds)
    slopes = [curve.slope(rows) for rows in range(1, 400)]
    assert slopes == sorted(slopes)
    assert slopes[0] == 0
    values = [curve.seconds(rows) for rows in range(1, 400)]
    assert values == sorted(values)
    assert curve.seconds(8) == pytest.approx(1.0)
    assert curve.seconds(512) == pytest.approx(6.0 + 256 * slopes[-1])


def test_a_curve_of_a_fixed_cost_goes_through_all_points():
    curve = CostCurve(convex=False)
    for rows, seconds in ((0, 0.0), (8, 5.0), (64, 6.0)):
        curve.record(rows, seconds)
    assert [curve.seconds(rows) for rows in (0, 8, 36, 64)] == pytest.approx([0.0, 5.0, 5.5, 6.0])


def test_one_interrupted_step_does_not_move_the_curve_far():
    curve = CostCurve()
    for _ in range(16):
        curve.record(8, 1.0)
    curve.record(64, 2.0)
    curve.record(8, 100.0)
    assert curve.seconds(8) < 1.2


def test_a_calibration_begins_with_what_it_is_told_and_follows_what_is_seen():
    calibration = Calibration(2)
    assert [calibration.probability(1, value) for value in (0.05, 0.55, 1.0)] == pytest.approx([0.05, 0.55, 0.95])
    for _ in range(4 * REFRESH):
        for _ in range(10):
            calibration.record([0.55, 0.25], 1)  # the second is rejected
        calibration.end_step()
    assert calibration.probability(0, 0.55) > 0.9
    assert calibration.probability(1, 0.25) < 0.1
    assert calibration.probability(1, 0.85) > 0.5, "what was not seen keeps what it is told"
    assert calibration.bins[5].accepted == calibration.bins[5].count == 40 * REFRESH


def test_tokens_behind_the_first_rejected_one_say_nothing():
    calibration = Calibration(3)
    calibration.record([0.15, 0.35, 0.95], 1)
    assert [each.count for each in calibration.bins] == [0, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    assert [each.accepted for each in calibration.bins] == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_a_map_never_falls():
    assert rising([0.1, 0.5, 0.3, 0.2, 0.9], [1, 1, 1, 2, 1]) == pytest.approx([0.1, 0.3, 0.3, 0.3, 0.9])


@dataclass(eq=False)
class Running:
    """What the budget reads of a request."""

    row: int
    num_uncomputed_tokens: int = 1


@dataclass
class Told:
    """What the store says of each row's draft."""

    confidences: list[list[float]] = field(default_factory=list)
    parents: list[list[int]] | None = None  # None: they are chains

    def report(self, row):
        told = self.confidences[row]
        return DraftReport(len(told), len(told), 0, [], told, self.parents and self.parents[row])


@dataclass
class Verified:
    """What the budget reads of a request's step."""

    request: Running
    num_drafted: int
    num_accepted: int

    @property
    def num_rows(self):
        return self.num_drafted + 1

    @property
    def accepted_nodes(self):
        return range(self.num_accepted)


def budget_of(confidences, *, row_cost=0.1, fixed=1.0):
    """A budget that knows the costs, and its requests."""
    running = [Running(row) for row in range(len(confidences))]
    budget = DraftBudget(K, running, Told(confidences), EngineMetrics("target", "proposer"))
    for rows in (1, 8, 64):
        budget._target.record(rows, fixed + row_cost * rows)
        budget._draft.record(rows, 0.0)
    budget._num_steps = 2 * K + 2  # nothing is tried out any more
    return budget, running


def planned(confidences, **costs):
    budget, running = budget_of(confidences, **costs)
    lengths = budget.plan(lambda request: len(confidences[request.row]))
    return [lengths(request) for request in running], budget


def test_likely_tokens_of_any_request_come_first():
    lengths, budget = planned([[0.95, 0.95, 0.95, 0.95], [0.15, 0.95], [0.95, 0.15, 0.95]], row_cost=0.3)
    assert lengths == [4, 0, 1]
    assert budget._metrics.counts["num_unverified_draft_tokens"] == 9 - 5


def test_nobody_waits_where_nobody_runs():
    assert planned([])[0] == []
    assert planned([[], []])[0] == [0, 0]


def test_free_rows_are_all_used_and_dear_ones_are_not():
    confidences = [[0.35, 0.35], [0.25, 0.05]]
    assert planned(confidences, row_cost=0.0)[0] == [2, 2]
    assert planned(confidences, row_cost=1000.0)[0] == [0, 0]


def test_where_a_proposer_cannot_tell_the_requests_own_acceptance_counts():
    budget, running = budget_of([[NAN, 0.95], [], [0.95, 0.95]])
    budget._recent = {running[0]: (0.0, 12.0), running[1]: (12.0, 12.0)}
    lengths = budget.plan(lambda request: 2)
    assert [lengths(each) for each in running] == [0, 2, 2]


def test_a_row_goes_on_while_its_product_pays_and_one_that_cannot_tell_does():
    calibration = Calibration(3)
    rule = calibration.stop_rule(0.35)  # the next token is accepted 0.7 times: so a product of 0.5 pays
    assert [rule.goes_on(told) for told in ([0.55], [0.45], [0.95, 0.55], [0.95, 0.45], [NAN, 0.55], [NAN])] == [
        True, False, True, False, True, True,
    ]  # fmt: skip
    assert calibration.stop_rule(0.0).goes_on([0.05, 0.05])


def after_steps(*, may_stop):
    """A budget after steps whose drafts were certain for one token, then hopeless."""
    running = [Running(row) for row in range(4)]
    told = [[0.95, 0.05, 0.05, 0.05] for _ in running]
    budget = DraftBudget(K, running, Told(told), EngineMetrics("target", "proposer"), may_stop=may_stop)
    rules = []
    for _ in range(70):
        lengths = budget.plan(lambda request: len(told[request.row]))
        committed = [Verified(each, lengths(each), min(lengths(each), 1)) for each in running]
        rows = sum(each.num_rows for each in committed)
        budget.num_made = budget.depth * len(running)
        budget.learn(committed, 1.0 + 0.1 * rows + 0.05 * budget.num_made, 0.05 * budget.num_made)
        rules.append(budget.stop_rule)
    return budget, rules


def test_rows_that_stop_are_asked_for_all_tokens_and_others_for_as_many_as_pay():
    stopping, rules = after_steps(may_stop=True)
    assert rules[: 2 * K] == [None] * 2 * K, "in the first steps drafts are made whole"
    assert rules[31] is None, "and in one of 32 after them"
    assert stopping.depth == K
    assert [stopping.stop_rule.goes_on(told) for told in ([0.95], [0.95, 0.05])] == [False, False]
    assert stopping._num_drafted == pytest.approx(1.0, abs=0.2), "a draft ends behind its first token"
    fixed, rules = after_steps(may_stop=False)
    assert rules == [None] * 70
    assert fixed.depth == 1


def test_the_time_of_drafting_is_counted_when_its_drafts_were_verified():
    """It depends on where they stopped, so on what was drawn; admission of the same drafts may not."""
    budget, running = budget_of([[0.95] * K])
    budget.num_made = 4
    budget.learn([Verified(running[0], 0, 0)], 2.0, 1.0)
    known = dict(budget._draft._points)
    budget.learn([Verified(running[0], 0, 0)], 2.0, 1.0)
    assert known.keys() != budget._draft._points.keys()


def test_a_token_is_admitted_whatever_it_and_those_behind_it_turn_out_to_be():
    """What makes it lossless: a confidence at i may depend on the tokens before i. So that of j > i may not matter."""
    rng = random.Random(1)
    for _ in range(300):
        confidences = [[rng.random() for _ in range(rng.randint(0, K))] for _ in range(5)]
        row_cost = rng.choice([0.02, 0.1, 0.3, 1.0])
        before, _ = planned(confidences, row_cost=row_cost)
        for b, each in enumerate(confidences):
            for i in range(len(each)):
                other = [*each[: i + 1], *(rng.random() for _ in each[i + 1 :])]  # drawn after the token at i
                changed = [*confidences[:b], other, *confidences[b + 1 :]]
                after, _ = planned(changed, row_cost=row_cost)
                assert (before[b] > i) == (after[b] > i)


@pytest.mark.parametrize(
    "settings",
    [{"method": "ngram", "num_speculative_tokens": 5}, {"model": "tiny/eagle3", "num_speculative_tokens": 5}],
    ids=["ngram", "eagle3"],
)
def test_the_text_is_the_plain_one_and_drafts_are_left_out(settings, prompts):
    short, params = prompts[:6], GREEDY.replace(max_tokens=40)
    asked = [{"prompt_token_ids": prompt} for prompt in short]
    plain = tokens(LLM("tiny", max_num_seqs=6, max_model_len=512).generate(asked, params))
    llm = LLM(
        "tiny", speculative_config=settings | {"enable_adaptive_verification": True}, max_num_seqs=6, max_model_len=512
    )
    assert tokens(llm.generate(asked, params)) == plain
    assert counter(llm, "num_unverified_draft_tokens") > 0, "in the first steps drafts of every length are tried"
    assert sum(each.count for each in budget_in(llm).calibration.bins) > 0
