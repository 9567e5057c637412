"""An author is told what is wrong, once, with the line of the author's own code and what to change."""

from __future__ import annotations

import inspect
import threading

import distribution_mutants
import form_mutants
import good_proposers
import hostile_proposers
import needs_mutants
import pytest
import state_mutants
import torch

from specdec import LLM, SamplingParams
from specdec.sdk.combinators import Adaptive, Chain
from specdec.testing import check_proposer
from specdec.testing.worlds import load_target


@pytest.fixture(autouse=True)
def _weights_as_loaded():
    yield
    load_target("tiny").restore_weights()


def line_of(function):
    return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"


def failed(results):
    return [result.check for result in results if result.status == "failed"]


ONE_MISTAKE = {
    form_mutants.FloatLengths: "draft_form",
    form_mutants.OutOfVocabulary: "draft_form",
    form_mutants.NeedsTwoTokens: "draft_form",
    state_mutants.ShiftsLengths: "draft_form",
    state_mutants.DraftsByInstance: "deterministic",
    state_mutants.BelievesItsDrafts: "accepts_and_rejects",
    needs_mutants.ReadsHistoryUndeclared: "draft_form",
    needs_mutants.WritesMoreThanDeclared: "draft_form",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ONE_MISTAKE, ids=lambda each: each.__name__)
def test_one_mistake_is_one_failure_and_the_other_checks_name_it(mutant):
    results = check_proposer(mutant)
    first = ONE_MISTAKE[mutant]
    explained = [result for result in results if result.status == "explained"]
    assert failed(results) == [first]
    assert len(explained) > 5
    assert {result.facts["explained_by"] for result in explained} == {first}
    assert not any(result.ok for result in explained)


def test_a_length_that_follows_outcomes_is_to_be_held_and_then_all_else_is_checked():
    adaptive, held = Adaptive.of(good_proposers.Followers), {"expected_rate": 0.99, "expected_weight": 1e6}
    (moving,) = check_proposer(adaptive, only=["accepts_and_rejects"])
    assert moving.status == "failed"
    assert "if its length follows what was accepted before, as in Adaptive, hold it" in moving.facts["fix"]
    settings = {"proposer_config": {"policy": held}}
    (constant,) = check_proposer(adaptive, settings, only=["accepts_and_rejects"])
    assert constant.status == "passed", constant.text
    (wrong,) = check_proposer(Adaptive.of(state_mutants.BelievesItsDrafts), settings, only=["accepts_and_rejects"])
    assert wrong.status == "failed"


@pytest.mark.slow
def test_sparse_ids_outside_the_vocabulary_are_one_violation():
    results = check_proposer(distribution_mutants.SparseIdsOutOfRange)
    (first,) = failed(results)
    told = next(result for result in results if result.check == first)
    assert "1000" in told.facts["found"]
    assert "Traceback" not in told.text


@pytest.mark.slow
def test_a_distribution_that_is_no_number_is_one_violation():
    assert failed(check_proposer(form_mutants.NanLogits)) == ["draft_form"]


def test_two_mistakes_are_two_failures():
    class Both(needs_mutants.NeverReadsHidden, state_mutants.KeepsFinished):
        pass

    assert failed(check_proposer(Both, only=["state_released", "needs_are_used"])) == [
        "state_released",
        "needs_are_used",
    ]


def test_a_failure_that_is_expected_explains_nothing():
    results = check_proposer(form_mutants.FloatLengths, level="basic", expected_failures={"draft_form": "known"})
    assert [result.status for result in results[1:4]] == ["expected_failure", "failed", "explained"]
    assert results[3].facts["explained_by"] == results[2].check


@pytest.mark.parametrize(
    ("mutant", "method"),
    [
        (hostile_proposers.Loops, hostile_proposers.Loops.draft),
        (hostile_proposers.SleepsThroughErrors, hostile_proposers.SleepsThroughErrors.on_start),
    ],
    ids=["loops", "sleeps"],
)
def test_a_check_that_does_not_end_is_a_failure_with_the_authors_line_and_the_stack(mutant, method):
    loads, draft_form, *others = check_proposer(mutant, level="basic", timeout=3)
    assert (loads.status, draft_form.status) == ("passed", "failed")
    found = draft_form.facts["found"]
    assert found.startswith("SD-E221 the check did not end within 3 s")
    lines, start = inspect.getsourcelines(method)
    where = next(line.split()[1] for line in found.splitlines() if line.split()[0] == "where")
    file, _, number = where.rpartition(":")
    assert file == inspect.getsourcefile(method)
    assert start <= int(number) < start + len(lines)
    assert f"in {method.__name__}" in found.partition("stack")[2]
    assert {result.status for result in others} == {"skipped"}
    assert {result.facts["reason"] for result in others} == {"draft_form did not end, and nothing is run after it"}


def test_outside_the_main_thread_checks_run_without_a_limit():
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(check_proposer(good_proposers.Followers, only=["loads"], timeout=1))
    )
    thread.start()
    thread.join()
    assert [result.status for result in results] == ["passed"]


@pytest.mark.parametrize(
    ("mutant", "method"),
    [
        (hostile_proposers.DraftsTooMany, hostile_proposers.DraftsTooMany.draft),
        (hostile_proposers.ReturnsNothing, hostile_proposers.ReturnsNothing.draft),
        (hostile_proposers.WithoutHistory, hostile_proposers.WithoutHistory.draft),
        (hostile_proposers.HeadWithFlatLogits, hostile_proposers.HeadWithFlatLogits),
    ],
    ids=lambda each: getattr(each, "__qualname__", None),
)
def test_an_error_after_a_method_returned_leads_to_the_author_all_the_same(mutant, method):
    (result,) = check_proposer(mutant, only=["draft_form"])
    assert f"where   {line_of(method)}" in result.facts["found"]


@pytest.mark.parametrize(
    ("mutant", "code", "declaration"),
    [
        (needs_mutants.ReadsHistoryUndeclared, "SD-E222", "needs = Needs(history=True, ...)"),
        (hostile_proposers.ReadsHiddenUndeclared, "SD-E222", 'needs = Needs(hidden_states=("final",), ...)'),
        (hostile_proposers.WithoutHistory, "SD-E210", "needs = Needs(history=True, ...)"),
    ],
    ids=["history", "hidden", "the base's history"],
)
def test_a_field_that_is_none_is_named_with_its_declaration(mutant, code, declaration):
    (result,) = check_proposer(mutant, only=["draft_form"])
    assert result.facts["found"].startswith(code)
    assert declaration in result.facts["found"]


@pytest.mark.parametrize("mutant", [needs_mutants.WritesMoreThanDeclared, needs_mutants.AttendsFurtherThanDeclared])
def test_a_draft_pass_past_the_positions_of_its_request_is_told_the_declaration(mutant):
    (result,) = check_proposer(mutant, only=["draft_form"])
    assert "of its request: declare a longer lookahead" in result.facts["found"]
    assert f"where   {line_of(mutant.propose).rpartition(':')[0]}" in result.facts["found"]


def test_a_method_that_is_never_called_is_reported_and_the_other_checks_run():
    loads, form, *_ = check_proposer(hostile_proposers.MisspeltEnd, level="basic")
    assert (loads.check, loads.status, form.status) == ("loads", "failed", "passed")
    assert "MisspeltEnd.on_finnish" in loads.facts["found"]
    assert "did you mean on_finish?" in loads.facts["found"]
    assert "MisspeltEnd.save" in loads.facts["found"]


def test_state_that_is_never_asked_for_is_told_to_ask():
    (result,) = check_proposer(hostile_proposers.MisspeltEnd, only=["saved_state"])
    assert "Needs(extensions=(State(),))" in result.facts["reason"]


@pytest.mark.parametrize("check", ["state_released", "reused_ids"])
def test_an_end_that_leaves_the_tokens_of_its_base_is_told_to_call_it(check):
    (result,) = check_proposer(hostile_proposers.EndsWithoutItsBase, only=[check])
    assert "super().on_finish(request)" in result.facts["fix"]


def test_a_setting_of_the_process_is_one_violation_and_is_put_back():
    results = check_proposer(hostile_proposers.SetsTheDefaultDtype, only=["loads", "draft_form", "greedy_equality"])
    assert torch.get_default_dtype() == torch.float32
    assert [result.status for result in results] == ["failed", "explained", "explained"]
    assert "torch.set_default_dtype(torch.float64)" in results[0].facts["found"]


def test_a_proposer_may_train_on_clones_of_what_it_observes():
    (result,) = check_proposer(good_proposers.LearnsByGradient, only=["draft_form"])
    assert result.status == "passed", result.text


def test_every_proposer_that_a_check_makes_is_closed():
    checks = ["loads", "deterministic", "instances_apart", "any_schedule", "services_within_calls", "state_machine"]
    results = check_proposer(good_proposers.HasAThread, only=checks)
    assert [result.text for result in results if result.status != "passed"] == []
    assert [each for each in threading.enumerate() if each.name == "from bind to close"] == []


def test_a_proposer_without_distributions_may_read_temperatures_only_where_a_request_is_sampled():
    results = check_proposer(good_proposers.FewerWhereSampled)
    assert [result.text for result in results if not result.ok] == []


@pytest.mark.parametrize("check", ["state_released", "memory_does_not_grow"])
def test_what_a_logger_leads_to_is_not_held_by_the_proposer(check):
    (result,) = check_proposer(good_proposers.Logs, only=[check])
    assert result.status == "passed", result.text


def test_what_one_proposer_writes_to_the_weights_is_not_held_against_the_next():
    check_proposer(state_mutants.ShiftsTheWeights, only=["draft_form"])
    (result,) = check_proposer(good_proposers.Followers, only=["shared_weights_not_written"])
    assert result.status == "passed", result.text


def test_none_of_the_authors_own_is_not_attributed_on_a_field_that_is_declared():
    (result,) = check_proposer(hostile_proposers.StumblesOverNone, only=["draft_form"])
    assert result.facts["found"].startswith("SD-E210")


def test_state_that_is_stale_after_a_preemption_is_told_of_on_preempt():
    (result,) = check_proposer(state_mutants.LearnsReplaysTwice, only=["preempted_requests"])
    assert "a request was preempted: in on_preempt(request) drop" in result.facts["fix"]


def test_where_nothing_was_preempted_on_preempt_is_not_mentioned():
    (result,) = check_proposer(state_mutants.BelievesItsDrafts, only=["accepts_and_rejects"])
    assert "on_preempt" not in result.facts["fix"]


@pytest.mark.parametrize("mutant", [state_mutants.LearnsInTheOrderOfRows, state_mutants.LearnsWhileItDrafts])
def test_learning_in_the_order_of_rows_is_told_to_learn_in_the_order_of_ids(mutant):
    results = check_proposer(mutant)
    (found,) = [result for result in results if not result.ok]
    assert found.check == "row_order"
    assert "before any draft of the step is made, and in the order of their ids" in found.facts["fix"]


def test_a_place_in_the_step_taken_for_a_request_is_told_so():
    (result,) = check_proposer(state_mutants.DraftsByPlace, only=["row_order"])
    assert result.facts["fix"] == "find a request by step.request_ids or step.slots, never by its place in the step"


@pytest.mark.parametrize("proposer", [good_proposers.SharedFollowers, state_mutants.LearnsAtTheEnd, "suffix"])
def test_a_learner_that_keeps_the_rule_passes(proposer):
    (result,) = check_proposer(proposer, only=["row_order"])
    assert result.status == "passed", result.text


def test_a_learner_from_ended_requests_would_depend_on_rows_if_ends_were_told_by_row(monkeypatch):
    """Shows that the check looks at requests that end together, and so that the order of ids is what makes it pass."""
    from specdec.core.runner import request_progress

    monkeypatch.setattr(request_progress, "sorted", lambda requests, key: list(requests), raising=False)
    assert failed(check_proposer("suffix", only=["row_order"])) == ["row_order"]


@pytest.mark.full
def test_a_head_without_kv_runs_on_the_autoregressive_base():
    results = check_proposer(hostile_proposers.HeadWithoutKV)
    assert [result.text for result in results if not result.ok] == []


def test_a_head_that_attends_without_draft_kv_is_told_to_declare_it():
    (result,) = check_proposer(hostile_proposers.HeadThatAttends, only=["draft_form"])
    assert "no draft KV is declared" in result.facts["found"]
    assert "DraftKV(...)" in result.facts["found"]


def test_a_proposer_that_promises_no_determinism_is_not_compared_with_itself():
    compared = ["length_ignores_the_draw", "distribution_ignores_the_draw", "output_distribution_is_exact"]
    held = ["distribution_is_a_distribution", "drawn_distribution_is_reported_distribution"]
    results = check_proposer(good_proposers.WavesWithNoise, only=[*compared, *held])
    found = {result.check: result.status for result in results}
    assert found == dict.fromkeys(compared, "skipped") | dict.fromkeys(held, "passed")


def test_the_state_that_a_user_keeps_is_read_and_never_written(tmp_path, monkeypatch):
    config = {"num_speculative_tokens": 3, "state_dir": str(tmp_path / "kept")}
    check_proposer(state_mutants.SavesCorpus, config, only=["greedy_equality"])
    assert not (tmp_path / "kept").exists()
    with LLM("tiny", speculative_config={"method": "state_mutants:SavesCorpus", **config}) as llm:
        llm.generate("def", SamplingParams(max_tokens=2))
    kept, read = list((tmp_path / "kept").rglob("*")), []
    monkeypatch.setattr(state_mutants.SavesCorpus, "load", lambda self, path: read.append(path / "corpus"))
    (result,) = check_proposer(state_mutants.SavesCorpus, config, only=["greedy_equality"])
    assert result.status == "passed", result.text
    assert list((tmp_path / "kept").rglob("*")) == kept
    assert read == [each for each in kept if each.name == "corpus"]


def test_a_part_with_a_k_of_its_own_is_not_asked_for_a_smaller_k_of_all():
    config = {"proposer_config": {"followers": {"num_speculative_tokens": 3}}}
    (result,) = check_proposer(Chain.of(good_proposers.Followers), config, only=["every_k"])
    assert result.status == "passed", result.text


def test_options_are_json_under_the_keys_that_users_write():
    config = {"proposer_config": {"max-drafts": 3}}
    (result,) = check_proposer(good_proposers.HasAKeyThatIsNoName, config, only=["options_are_json"])
    assert result.status == "passed", result.text


@pytest.mark.parametrize("k", [32, 1024])
def test_long_drafts_that_are_accepted_end_no_text_of_a_schedule(k):
    checks = ["deterministic", "accepts_and_rejects"]
    results = check_proposer(good_proposers.RepeatsAtLength, {"num_speculative_tokens": k}, only=checks)
    assert [result.text for result in results if result.status != "passed"] == []
