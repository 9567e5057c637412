"""The kit is itself tested: every check catches the mistake that it is there for, and good proposers pass."""

from __future__ import annotations

import distribution_mutants
import form_mutants
import good_proposers
import needs_mutants
import obligation_mutants
import pytest
import state_mutants

from specdec.testing import check_proposer
from specdec.testing.checks import ALL_CHECKS
from specdec.testing.worlds import load_target

CAUGHT = [
    ("loads", form_mutants.RaisesInBind),
    ("loads", form_mutants.RefusesItsOwnState),
    ("draft_form", form_mutants.FloatLengths),
    ("draft_form", form_mutants.OutOfVocabulary),
    ("draft_form", form_mutants.Transposed),
    ("draft_form", form_mutants.UndeclaredDistribution),
    ("every_k", form_mutants.FixedWidth),
    ("every_k", form_mutants.RemembersK),
    ("budgets", form_mutants.IgnoresBudget),
    ("budgets", form_mutants.DraftsWhereNothingIsWanted),
    ("one_token_prompts", form_mutants.NeedsTwoTokens),
    ("context_limit", form_mutants.RunsOverTheEnd),
    ("inputs_not_written", state_mutants.ShiftsLengths),
    ("inputs_not_written", state_mutants.WritesThroughNumpy),
    ("views_not_kept", state_mutants.KeepsAView),
    ("views_not_kept", state_mutants.KeepsTheNewest),
    ("shared_weights_not_written", state_mutants.ShiftsTheWeights),
    ("deterministic", state_mutants.DraftsByInstance),
    ("instances_apart", state_mutants.KeepsInTheClass),
    ("batch_equals_singles", state_mutants.MixesRequests),
    ("every_row", distribution_mutants.LiesInOneRow),
    ("row_order", state_mutants.DraftsByPlace),
    ("row_order", state_mutants.LearnsInTheOrderOfRows),
    ("row_order", state_mutants.LearnsWhileItDrafts),
    ("namespaces_kept_apart", state_mutants.SharesAcrossNamespaces),
    ("accepts_and_rejects", state_mutants.BelievesItsDrafts),
    ("chunked_prefill", state_mutants.OnlyTheLastChunk),
    ("skipped_steps", state_mutants.ForgetsTheAbsent),
    ("preempted_requests", state_mutants.LearnsReplaysTwice),
    ("aborted_requests", state_mutants.ClearsEverything),
    ("reused_ids", state_mutants.KeepsByName),
    ("reused_ids", state_mutants.KeepsByPrompt),
    ("reused_slots", state_mutants.KeepsByRow),
    ("reused_slots", state_mutants.StaleKV),
    ("any_schedule", state_mutants.RemembersPlaces),
    ("state_released", state_mutants.KeepsFinished),
    ("state_released", state_mutants.CountsInTheClass),
    ("state_released", state_mutants.CountsInANetworksClass),
    ("needs_are_enough", needs_mutants.ReadsHistoryUndeclared),
    ("needs_are_enough", needs_mutants.ReadsHistoryIfThere),
    ("needs_are_used", needs_mutants.NeverReadsHidden),
    ("needs_are_used", needs_mutants.NeverUsesDraftKV),
    ("needs_are_used", needs_mutants.NeverReadsTopK),
    ("accepts_and_rejects", needs_mutants.WritesMoreThanDeclared),
    ("declared_distribution_is_reported", needs_mutants.NeverReportsItsDistribution),
    ("lengths_as_declared", needs_mutants.ShorterThanDeclared),
    ("distribution_is_a_distribution", form_mutants.NanLogits),
    ("distribution_is_a_distribution", form_mutants.ReportsTopOne),
    ("distribution_is_a_distribution", distribution_mutants.SparseIdsOutOfRange),
    ("length_ignores_the_draw", distribution_mutants.TrimsUnluckyTokens),
    ("length_ignores_the_draw", distribution_mutants.TrimsFromTheSecond),
    ("distribution_ignores_the_draw", distribution_mutants.SharpensAfterTheDraw),
    ("greedy_equality", state_mutants.ShiftsTheWeights),
    ("saved_state", state_mutants.SavesNothing),
    ("saved_state", state_mutants.SavesNoRunningRequest),
    ("saved_state", state_mutants.LoadsNothingEmpty),
    ("saved_state", state_mutants.OnlySaves),
    ("saved_state", state_mutants.SavesBeside),
    ("drawn_distribution_is_reported_distribution", distribution_mutants.ReportsAnotherTemperature),
    ("drawn_distribution_is_reported_distribution", distribution_mutants.LiesAtTheLastPlace),
    ("drawn_distribution_is_reported_distribution", distribution_mutants.OneNumberForAll),
    ("output_distribution_is_exact", distribution_mutants.OnePercentOff),
    ("output_distribution_is_exact", distribution_mutants.ReportsAnotherTemperature),
    ("greedy_equality_under_pressure", state_mutants.ShiftsTheWeightsWhenPreempted),
    ("long_texts", state_mutants.ForShortTexts),
    ("long_texts", state_mutants.CutsAtAMark),
    ("memory_does_not_grow", state_mutants.CountsForever),
    ("memory_does_not_grow", state_mutants.CountsInTheClass),
    ("memory_does_not_grow", state_mutants.CountsInANetworksClass),
    ("state_machine", state_mutants.KeepsByRow),
]
BROKEN = [
    ("ends_known_late", obligation_mutants.MissesTokensAtTheEnd, "request.end.output_token_ids"),
    ("cached_prefix", obligation_mutants.KeptByRow, "step.generation"),
    ("cached_prefix", obligation_mutants.ExpectsAWholePrompt, "whole_prompt=True"),
    ("idle_steps", obligation_mutants.TakesTheMostOfNone, "default=0"),
    ("idle_steps", obligation_mutants.CountsDummies, "step.dummy"),
    ("idle_steps", obligation_mutants.LooksUpDummies, "step.dummy"),
    ("metrics_between_steps", obligation_mutants.TellsWhatIsNoNumber, "finite numbers"),
    ("metrics_between_steps", obligation_mutants.ForgetsWhenAsked, "change nothing"),
    ("services_within_calls", obligation_mutants.EmbedsOnAThread, "copies"),
    ("services_within_calls", obligation_mutants.LeavesAThread, "join it there"),
    ("same_calls_on_every_rank", obligation_mutants.EmbedsByInstance, "every rank has alike"),
    ("needs_are_pure", obligation_mutants.AsksForMoreEachTime, "arguments alone"),
    ("options_are_json", obligation_mutants.RequestOptionsOfCode, "plain values"),
    ("options_are_json", needs_mutants.OptionsOfCode, "plain values"),
    ("class_is_importable", obligation_mutants.Elsewhere, "top of a module"),
    ("nothing_deprecated", obligation_mutants.UsesWhatGoes, "use step.width"),
]
GOOD = [
    pytest.param(good_proposers.Followers, marks=pytest.mark.slow),
    pytest.param(good_proposers.SharedFollowers, marks=pytest.mark.slow),
    pytest.param(good_proposers.Waves, marks=pytest.mark.slow),
    good_proposers.HiddenMean,
]


@pytest.fixture(autouse=True)
def _weights_as_loaded():
    """Mutants write to the shared target."""
    yield
    load_target("tiny").restore_weights()


@pytest.fixture(autouse=True)
def _threads_end():
    obligation_mutants.END.clear()
    yield
    obligation_mutants.END.set()


@pytest.mark.parametrize(("check", "mutant"), CAUGHT, ids=lambda each: getattr(each, "__name__", each))
def test_mutant_is_caught_by_the_check_meant_for_it(check, mutant):
    (result,) = check_proposer(mutant, only=[check])
    assert result.status == "failed", result
    assert result.check == check
    assert {"expected", "found", "reproduce"} <= result.facts.keys()


@pytest.mark.parametrize(("check", "mutant", "fix"), BROKEN, ids=lambda each: getattr(each, "__name__", each))
def test_a_broken_obligation_fails_its_own_check_with_the_fix(check, mutant, fix):
    (result,) = check_proposer(mutant, only=[check])
    assert (result.check, result.status) == (check, "failed")
    assert fix in result.facts["fix"]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "mutant", "fix"), BROKEN, ids=lambda each: getattr(each, "__name__", each))
def test_a_broken_obligation_fails_no_other_check(check, mutant, fix):
    level = "full" if check in {"class_is_importable", "nothing_deprecated"} else "standard"
    results = check_proposer(mutant, level=level)
    assert [each.check for each in results if each.status == "failed"] == [check]


@pytest.mark.parametrize("check", ["instances_apart", "batch_equals_singles"])
def test_a_proposer_may_report_its_distribution_in_memory_that_it_uses_again(check):
    (result,) = check_proposer(good_proposers.WavesInABuffer, only=[check])
    assert result.status == "passed", result.text


@pytest.mark.parametrize("check", ["needs_are_used", "declared_distribution_is_reported"])
def test_what_is_read_and_reported_where_nothing_is_drafted_is_not_known(check):
    (result,) = check_proposer(good_proposers.WavesSeldom, only=[check])
    assert result.status == "skipped", result.text
    assert "it drafts nothing on the texts of this check" in result.facts["reason"]


def test_every_check_has_a_mutant():
    on_a_device = {"streams"}  # tests/gpu/stream_proposers.py
    assert {check.name for check in ALL_CHECKS} - on_a_device == {check for check, *_ in (*CAUGHT, *BROKEN)}


@pytest.mark.full
@pytest.mark.parametrize("good", GOOD, ids=lambda each: each.__name__)
def test_good_proposer_passes_every_check(good):
    results = check_proposer(good, level="full")
    assert [result.text for result in results if not result.ok] == []
    assert sum(result.status == "passed" for result in results) > 20
