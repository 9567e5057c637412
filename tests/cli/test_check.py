"""`specdec check` names a check before it runs it, so that whatever happens then has a name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli._app import build_app

MUTANTS = Path(__file__).parents[1] / "testing" / "mutants"
TEST_FILE = """
import hostile_proposers
from specdec.testing import ProposerConformance


class TestIt(ProposerConformance):
    proposer = hostile_proposers.{name}
    level = "basic"
    timeout = {timeout}
"""


def run(*command, cwd):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(MUTANTS), *filter(None, sys.path)])}
    arguments = [sys.executable, "-m", *command]
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300)


def check(name, *arguments, cwd):
    return run("specdec", "check", f"hostile_proposers:{name}", "--level", "basic", *arguments, cwd=cwd)


@pytest.mark.full
def test_a_crash_names_the_check_and_the_frame(tmp_path):
    done = check("Crashes", cwd=tmp_path)
    assert done.returncode < 0
    assert done.stdout.splitlines()[-1].split() == ["draft_form"]
    assert "Segmentation fault" in done.stderr
    assert "hostile_proposers.py" in done.stderr
    assert "in draft\n" in done.stderr


@pytest.mark.full
def test_a_hang_is_a_failure_and_the_rest_is_not_run(tmp_path):
    done = check("Loops", "--timeout", "10", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "SD-E221 the check did not end within 10 s" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 passed, 1 failed, 4 skipped in")


@pytest.mark.full
def test_a_hang_that_cannot_be_interrupted_ends_the_process_with_the_stack(tmp_path):
    done = check("LoopsInC", "--timeout", "10", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].split() == ["draft_form"]
    assert "Timeout (0:00:15)!" in done.stderr
    assert "in draft\n" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "timeout", "told"),
    [("Crashes", 300, "Segmentation fault"), ("LoopsInC", 10, "Timeout (0:00:15)!")],
    ids=["crash", "hang"],
)
def test_pytest_shows_the_stack_with_the_check_in_it(tmp_path, name, timeout, told):
    (tmp_path / "test_it.py").write_text(TEST_FILE.format(name=name, timeout=timeout))
    done = run("pytest", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path)
    assert done.returncode != 0
    stack = done.stderr.partition(told)[2]
    assert "in draft\n" in stack
    assert "in draft_form\n" in stack


@pytest.mark.full
def test_pytest_fails_the_first_check_of_a_cause_and_skips_the_others_with_its_name(tmp_path):
    (tmp_path / "test_it.py").write_text(TEST_FILE.format(name="ReturnsNothing", timeout=300))
    done = run("pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "1 failed, 1 passed, 4 skipped" in done.stdout
    assert "fails, and is explained by draft_form" in done.stdout


def test_checks_of_one_cause_are_named_and_not_told_again(monkeypatch):
    monkeypatch.syspath_prepend(str(MUTANTS))
    done = CliRunner().invoke(build_app(), ["check", "form_mutants:FloatLengths", "--level", "basic"])
    assert done.exit_code == 1
    assert done.stdout.count("SD-E201") == 1
    assert done.stdout.count("explained by draft_form") == 4
    assert "every_k, budgets, one_token_prompts, context_limit" in done.stdout.splitlines()[-1]
