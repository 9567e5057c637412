"""Four doors to one list of checks: a class, a function, the command, and pytest without a test file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentTypeError

import form_mutants
import good_proposers
import pytest
from typer.testing import CliRunner

from specdec.cli._app import build_app
from specdec.sdk import ConfigError
from specdec.sdk.errors import PluginLoadError
from specdec.sdk.packaged import packaged
from specdec.testing import ProposerConformance, check_proposer
from specdec.testing.checks import ALL_CHECKS, checks_of
from specdec.testing.pytest_plugin import json_object
from specdec.testing.report import LEVELS
from specdec.testing.run import Run, as_expected
from specdec.testing.subject import Subject, is_checkpoint
from specdec.testing.suite import as_parameters

PYTEST_PLUGIN = "specdec.testing.pytest_plugin"
BASIC = [check.name for check in checks_of("basic")]


class TestGoodProposerByClass(ProposerConformance):
    proposer = good_proposers.Followers
    level = "basic"


class TestGoodProposerByPath(ProposerConformance):
    proposer = "good_proposers.HiddenMean"
    speculative_config = {"num_speculative_tokens": 3, "offset": 1}  # noqa: RUF012 - as an author writes it
    level = "basic"


class TestKnownMistake(ProposerConformance):
    proposer = form_mutants.RunsOverTheEnd
    level = "basic"
    expected_failures = {"context_limit": "its users never come near the end of the context"}  # noqa: RUF012


class TestLocalClass(ProposerConformance):
    level = "basic"

    class Nested(good_proposers.Followers):
        pass

    proposer = Nested


def statuses(results):
    return {result.check: result.status for result in results}


def test_levels_hold_the_checks_of_those_below():
    names = [[check.name for check in checks_of(level)] for level in LEVELS]
    assert names[0] == names[1][: len(names[0])]
    assert names[1] == names[2][: len(names[1])]
    assert len(names[2]) == len(ALL_CHECKS) == len(set(names[2]))


def test_every_check_states_its_rule():
    assert [check.name for check in ALL_CHECKS if len(check.rule.split()) < 8] == []


def test_parameters_have_readable_ids_and_strict_expectations():
    parameters = as_parameters("basic", {"budgets": "known"})
    assert [each.id for each in parameters] == BASIC
    (mark,) = parameters[BASIC.index("budgets")].marks
    assert mark.kwargs == {"reason": "known", "strict": True, "raises": pytest.fail.Exception}


def test_the_call_that_reproduces_a_failure_names_the_target():
    (result,) = check_proposer(form_mutants.RaisesInBind, only=["loads"], target=(target := str(packaged("tiny"))))
    call = f"check_proposer('form_mutants:RaisesInBind', only=['loads'], seed=0, target={target!r})"
    assert result.facts["reproduce"] == call


def test_failure_says_what_where_and_how_to_reproduce_it():
    (result,) = check_proposer(form_mutants.OutOfVocabulary, {"num_speculative_tokens": 3}, only=["draft_form"], seed=5)
    assert not result.ok
    assert "SD-E203" in result.facts["found"]
    assert "step 1 of seed 5" in result.facts["where"]
    call = "check_proposer('form_mutants:OutOfVocabulary', {'num_speculative_tokens': 3}, only=['draft_form'], seed=5)"
    assert result.facts["reproduce"] == call
    assert all(f"\n  {label}" in result.text for label in ("expected", "found", "where", "fix", "reproduce"))


def test_nothing_runs_after_it_failed_to_load():
    results = check_proposer(form_mutants.RaisesInBind, level="basic")
    assert statuses(results) == {name: "failed" if name == "loads" else "skipped" for name in BASIC}
    assert "no weights here" in results[0].text


def test_expected_failure_passes_and_unexpected_pass_fails():
    expected = {"one_token_prompts": "known", "budgets": "thought to be broken"}
    results = check_proposer(
        form_mutants.NeedsTwoTokens, only=["one_token_prompts", "budgets"], expected_failures=expected
    )
    assert statuses(results) == {"one_token_prompts": "expected_failure", "budgets": "unexpected_pass"}
    assert {result.check: result.ok for result in results} == {"one_token_prompts": True, "budgets": False}
    assert as_expected(results[0], None) is results[0]


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_expected_failure_without_a_reason_is_refused(reason):
    with pytest.raises(ConfigError, match="has no reason"):
        check_proposer(good_proposers.Followers, expected_failures={"budgets": reason})


def test_unknown_check_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="row_order"):
        check_proposer(good_proposers.Followers, only=["row_ordre"])


@pytest.mark.parametrize(
    ("proposer", "arguments", "told"),
    [
        ("ngram", {"timeout": float("inf")}, "0 .. 1000000 seconds"),
        ("ngram", {"timeout": -1}, "0 .. 1000000 seconds"),
        ("ngram", {"level": "all"}, "basic, standard, full"),
        ("ngram", {"speculative_config": {"method": "suffix"}}, "leave out method"),
        (good_proposers.Waves, {"speculative_config": {"method": "suffix"}}, "leave out method"),
        (good_proposers.Waves(None), {}, "the class itself"),
        ("pkg.Class", {"speculative_config": {"model": "here"}}, r'"pkg:Class", for a class with this checkpoint'),
        ("tiny/eagle3", {"speculative_config": {"model": "here"}}, "fix +leave out model"),
        ("ngram", {"expected_failures": ["budgets"]}, "expected failures have no reasons"),
        ("ngram", {"speculative_config": ["prompt_lookup_max"]}, "speculative_config is not an object"),
    ],
    ids=[
        "no end",
        "negative",
        "level",
        "two methods",
        "class and method",
        "instance",
        "class and checkpoint",
        "two checkpoints",
        "expected without reasons",
        "settings in a list",
    ],
)
def test_arguments_that_name_nothing_are_refused(proposer, arguments, told):
    with pytest.raises(ConfigError, match=f"(?s)SD-E132.*{told}"):
        check_proposer(proposer, **arguments)


def test_settings_may_be_a_text_of_json_as_for_an_engine():
    (result,) = check_proposer("ngram", '{"prompt_lookup_max": 70}', only=["loads"])
    assert "prompt_lookup_max" in result.facts["found"]
    with pytest.raises(ConfigError, match="SD-E130 speculative_config is not JSON"):
        check_proposer("ngram", "prompt_lookup_max=3", only=["loads"])


def test_one_check_may_be_named_without_a_list():
    assert [result.check for result in check_proposer("ngram", only="loads")] == ["loads"]


def test_a_path_is_a_checkpoint():
    (result,) = check_proposer(packaged("tiny/eagle3"), only=["loads"])
    assert result.status == "passed", result.text


def test_a_folder_with_the_name_of_a_method_hides_it_only_if_it_is_a_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "ngram").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_checkpoint("ngram")
    (tmp_path / "ngram" / "config.json").touch()
    assert is_checkpoint("ngram")


def test_unknown_proposer_is_an_error_and_no_result():
    with pytest.raises(PluginLoadError, match="SD-E101"):
        check_proposer("nobodys-proposer")


@pytest.mark.parametrize("isolation", [None, "process"])
def test_a_target_that_does_not_load_is_an_error_and_no_result(isolation):
    with pytest.raises(ConfigError, match="SD-E140"):
        check_proposer(good_proposers.Followers, target="no/such/target", isolation=isolation)
    with pytest.raises(ConfigError, match="SD-E140"):  # the door of a class, and of pytest without a test file
        Run().check(ALL_CHECKS[0], Subject(good_proposers.Followers, {}, "no/such/target"))


def test_class_that_cannot_be_imported_is_not_run_in_the_engine():
    class Local(good_proposers.Followers):
        pass

    (result,) = check_proposer(Local, only=["greedy_equality"])
    assert result.status == "skipped"
    assert "not at the top of a module" in result.facts["reason"]


def specdec(*arguments):
    return CliRunner().invoke(build_app(), ["check", *arguments])


def test_command_reports_as_json_and_exits_with_1():
    done = specdec("form_mutants:NeedsTwoTokens", "--level", "basic", "--json", "--xfail", "budgets=known")
    assert done.exit_code == 1, done.output
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert list(rows) == BASIC
    assert rows["draft_form"]["status"] == "failed"
    assert rows["one_token_prompts"]["status"] == "explained"
    assert rows["one_token_prompts"]["facts"]["explained_by"] == "draft_form"
    assert rows["budgets"]["status"] == "unexpected_pass"
    assert rows["loads"]["ok"]


def test_command_prints_a_line_per_check():
    done = specdec("ngram", "--level", "basic", "-sc", '{"prompt_lookup_max": 3}')
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [[name, "passed"] for name in BASIC]
    assert lines[-1].startswith(f"{len(BASIC)} passed in ")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["nobodys-proposer"], 3, "SD-E101"),
        (["ngram", "-sc", '{"prompt_lookup_mxa": 3}', "--only", "loads"], 1, "prompt_lookup_max"),
        (["ngram", "--only", "lods"], 2, "loads"),
        (["ngram", "--xfail", "loads"], 2, "CHECK=REASON"),
    ],
    ids=["unknown proposer", "unknown option", "unknown check", "no reason"],
)
def test_command_refuses_what_it_cannot_do(arguments, code, told):
    done = specdec(*arguments)
    assert done.exit_code == code
    assert told in done.stderr + done.stdout


@pytest.mark.full
def test_pytest_runs_it_without_a_test_file(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.path.dirname(good_proposers.__file__)}
    arguments = ["--pyargs", "specdec.testing", "--proposer", "ngram", "--proposer", "form_mutants.RunsOverTheEnd"]
    arguments += ["--proposer-level", "basic", "-q", "-rf", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugin_arguments(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600)
    assert done.returncode == 1, done.stdout
    assert f"1 failed, {2 * len(BASIC) - 1} passed" in done.stdout
    assert "test_proposer[form_mutants.RunsOverTheEnd-context_limit]" in done.stdout


@pytest.mark.parametrize(
    ("text", "told"), [("[1]", "not a JSON object"), ("{", "is not JSON: "), ("k=1", "is not JSON")]
)
def test_options_of_pytest_that_are_no_json_object_are_refused(text, told):
    with pytest.raises(ArgumentTypeError, match=told):
        json_object(text)


def test_a_project_may_have_an_option_of_the_same_name(tmp_path):
    """Its pytest loads our plugin wherever we are installed."""
    (tmp_path / "conftest.py").write_text('def pytest_addoption(parser): parser.addoption("--proposer")')
    (tmp_path / "test_theirs.py").write_text(
        'def test_it(pytestconfig): assert pytestconfig.getoption("--proposer") == "Ada"'
    )
    command = [sys.executable, "-m", "pytest", *plugin_arguments(), "--proposer", "Ada", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def plugin_arguments():
    """How to name the pytest plugin where no entry point does."""
    import importlib_metadata

    registered = importlib_metadata.entry_points(group="pytest11")
    return [] if any(point.value == PYTEST_PLUGIN for point in registered) else ["-p", PYTEST_PLUGIN]
