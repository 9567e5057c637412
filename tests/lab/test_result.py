import pytest

from specdec.core.request.metrics import RequestMetrics
from specdec.lab.equality import first_difference
from specdec.lab.measure import Pass
from specdec.lab.result import Baseline, Timing, run_facts


def one_pass(category, seconds, num_steps=4, num_accepted=3):
    counts = RequestMetrics()
    for _ in range(num_steps):
        counts.record(5, num_accepted, num_accepted + 1)
    return Pass(category, seconds, {category: (1, 2)}, counts, num_steps, {"forward": seconds / 2, "propose": 0.0})


REPEATS = [(one_pass("a", 1.0), one_pass("b", 2.0)), (one_pass("a", 1.2), one_pass("b", 2.2))]
PLAIN = [(one_pass("a", 2.0), one_pass("b", 7.0)), (one_pass("a", 2.2), one_pass("b", 7.8))]
TIMING = Timing.of(REPEATS)
BASELINE = Baseline(Timing.of(PLAIN), paired=True)


def test_speedup_is_total_time_over_total_time():
    facts = run_facts(REPEATS, BASELINE)
    assert facts["speedup"] == pytest.approx((2.0 + 7.0 + 2.2 + 7.8) / (1.0 + 2.0 + 1.2 + 2.2))
    assert facts["speedup"] == pytest.approx(facts["baseline_seconds"] / facts["seconds"])
    assert facts["by_category"]["a"]["speedup"] == pytest.approx(4.2 / 2.2)


def test_texts_of_other_lengths_are_compared_by_the_time_for_a_token():
    longer = [[one_pass("a", 2.0, num_steps=8), one_pass("b", 7.0, num_steps=4)]] * 2
    baseline, even = Baseline(Timing.of(longer), paired=True), Baseline(Timing.of([PLAIN[0]] * 2), paired=True)
    facts = run_facts(REPEATS, baseline)
    assert facts["by_category"]["a"]["speedup"] == even.speedup(TIMING, "a") / 2
    assert facts["by_category"]["b"]["speedup"] == even.speedup(TIMING, "b")
    assert facts["speedup"] == pytest.approx(facts["tokens_per_second"] / facts["baseline_tokens_per_second"])
    assert facts["speedup_interval"] == pytest.approx([each * 2 / 3 for each in even.interval(TIMING)])
    assert facts["break_even_tokens_per_step"] == pytest.approx(facts["tokens_per_target_step"] / facts["speedup"])


def test_interval_is_that_of_students_t_on_log_ratios():
    # ratios 3.0 and 10 / 3.4 of two pairs: mean log 1.088711, standard deviation 0.0140026, t(1) = 12.706
    low, high = BASELINE.interval(TIMING)
    assert (low, high) == pytest.approx((2.61920, 3.36869), rel=1e-4)
    assert low < BASELINE.speedup(TIMING) < high


@pytest.mark.parametrize(
    ("repeats", "paired"), [(REPEATS[:1], True), (REPEATS, False)], ids=["one repeat", "an earlier run"]
)
def test_no_interval_without_pairs(repeats, paired):
    baseline = Baseline(Timing.of(PLAIN[: len(repeats)]), paired)
    assert baseline.interval(Timing.of(repeats)) is None
    facts = run_facts(repeats, baseline)
    assert facts["speedup"] > 1
    assert facts["repeats"][0]["baseline_seconds"] == (9.0 if paired else None)


def test_counts_are_those_of_one_repeat():
    facts = run_facts(REPEATS, None)
    assert facts["num_drafts"] == 8
    assert facts["num_accepted_tokens"] == 24
    assert facts["num_output_tokens"] == 32
    assert facts["proposer_propose_calls"] == 8
    assert facts["mean_acceptance_length"] == 4
    assert facts["tokens_per_second"] == pytest.approx(32 / 3.2)
    assert facts["speedup"] is None


def test_break_even_is_where_speedup_would_be_one():
    facts = run_facts(REPEATS, BASELINE)
    assert facts["break_even_tokens_per_step"] == pytest.approx(facts["tokens_per_target_step"] / facts["speedup"])


def test_time_shares_cover_all_of_the_time():
    shares = run_facts(REPEATS, BASELINE)["time_shares"]
    assert shares["forward"] == pytest.approx(0.5)
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("plain", "found", "position"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((1,), (1, 2), 1), ((), (), None)],
)
def test_the_first_difference_counts_an_early_end(plain, found, position):
    assert first_difference(plain, found) == position
