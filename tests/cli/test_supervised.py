"""A plugin that ends, crashes or blocks the process: what the command's status and its last lines say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "testing" / "mutants"
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(MUTANTS), *filter(None, sys.path)])}


def drafting(name):
    return "-sc", f'{{"model": "hostile_proposers:{name}", "num_speculative_tokens": 3}}'


def start(*arguments, cwd):
    command = [sys.executable, "-m", "specdec", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, cwd=cwd, start_new_session=True, **pipes)


def run(*arguments, cwd):
    process = start(*arguments, cwd=cwd)
    printed, told = process.communicate(timeout=600)
    return process.returncode, printed, told


GENERATE = ("generate", "tiny", "-p", "def f(", "--max-tokens", "8", "--json")
BENCH = ("bench", "tiny", "--num-prompts", "1", "--output-len", "8", "--json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        (*GENERATE, *drafting("EndsTheProcess")),
        pytest.param(("check", "hostile_proposers:EndsTheProcess", "--level", "basic"), marks=pytest.mark.full),
        pytest.param((*BENCH, *drafting("EndsTheProcess")), marks=pytest.mark.full),
        pytest.param((*BENCH, *drafting("EndsTheProcessInC")), marks=pytest.mark.full),
    ],
    ids=["generate", "check", "bench", "in C"],
)
def test_a_proposer_that_ends_the_process_with_status_0_fails_the_command(tmp_path, command):
    status, printed, told = run(*command, cwd=tmp_path)
    assert status == 1
    assert "SD-E231 the process ended with exit status 0, before the command did" in told
    assert "propose of hostile_proposers:EndsTheProcess" in told
    assert "no result was written" in told
    assert "{" not in printed


@pytest.mark.full
def test_a_thread_that_a_proposer_leaves_does_not_keep_the_command(tmp_path):
    status, printed, told = run("check", "hostile_proposers:LeavesAThread", "--only", "draft_form", cwd=tmp_path)
    assert (status, "1 passed" in printed) == (1, True)
    assert "the command is over, and threads of a plugin are not: left over" in told


@pytest.mark.full
def test_a_crash_while_generating_names_the_line_and_the_proposer(tmp_path):
    status, printed, told = run(*GENERATE, *drafting("Crashes"), cwd=tmp_path)
    assert status == -signal.SIGSEGV
    assert "Segmentation fault" in told
    assert "hostile_proposers.py" in told
    assert "in draft\n" in told
    assert "running  propose of hostile_proposers:Crashes" in told
    assert printed == ""


@pytest.mark.full
def test_the_status_of_a_command_that_comes_to_its_end_is_its_own(tmp_path):
    assert run("--version", cwd=tmp_path)[0] == 0
    status, _, told = run("explain", "SD-E000", cwd=tmp_path)
    assert status == 2, told
    assert "SD-E231" not in told


def test_the_parent_imports_nothing_heavy(tmp_path):
    code = (
        "import os, sys\n"
        "os.fork = lambda: 0\n"  # so that what is there at the fork can be looked at
        "import specdec.testing.supervision as supervision\n"
        "heavy = {'torch', 'typer', 'pydantic', 'rich'}\n"
        "supervision._end_with_parent = lambda: print(len(heavy & set(sys.modules)), flush=True)\n"
        "import specdec.cli\n"
        "sys.argv = ['specdec', '--version']\n"
        "specdec.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[0] == "0"


def until(process, text):
    """Lines of standard error up to one that has the text."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a child with its parent")
def test_a_killed_parent_takes_the_child_with_it(tmp_path):
    process = start(*GENERATE, *drafting("Loops"), cwd=tmp_path)
    until(process, "looping")
    process.kill()
    process.communicate(timeout=600)  # its pipes close once the child is gone


@pytest.mark.full
def test_an_interrupt_says_where_in_the_proposer_it_came(tmp_path):
    process = start(*GENERATE, *drafting("Loops"), cwd=tmp_path)
    until(process, "looping")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: parent and child
    _, told = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "interrupted in propose of hostile_proposers:Loops\n  at " in told
    assert "in draft\n" in told
    assert "hostile_proposers.py:" in told


@pytest.mark.full
@pytest.mark.parametrize("name", ["SwallowsInterrupts", pytest.param("LoopsInC", marks=pytest.mark.full)])
def test_a_second_interrupt_ends_a_proposer_that_does_not_let_the_first_pass(tmp_path, name):
    process = start(*GENERATE, *drafting(name), cwd=tmp_path)
    until(process, "looping")
    for _ in range(2):
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL
    assert "hostile_proposers.py" in told
    assert "in draft\n" in told
    assert f"running  propose of hostile_proposers:{name}" in told


@pytest.mark.full
def test_what_a_proposer_prints_is_no_part_of_a_result(tmp_path):
    status, printed, told = run(*GENERATE, *drafting("Prints"), cwd=tmp_path)
    assert status == 0, told
    assert len(json.loads(printed)["token_ids"]) == 8
    for way in ("in bind", "in draft", "at exit", "by a library", "by a subprocess"):
        assert f"printed {way}\n" in told


@pytest.mark.full
def test_the_table_of_checks_is_not_torn_by_prints(tmp_path):
    status, printed, told = run("check", "hostile_proposers:Prints", "--level", "basic", cwd=tmp_path)
    assert status == 0, told
    assert all("passed" in line or "skipped" in line for line in printed.splitlines())
    assert "printed in draft" in told


@pytest.mark.full
def test_a_call_that_does_not_end_is_named_once_with_its_line(tmp_path):
    status, _, told = run("--watch", "0.5", *GENERATE, "--max-tokens", "3", *drafting("Sleeps"), cwd=tmp_path)
    assert status == 0, told
    assert told.count("SD-W317 propose has not ended after 0.5 s   [hostile_proposers:Sleeps]") == 1
    where = told.partition("SD-W317 propose")[2].splitlines()[1]
    assert "hostile_proposers.py:" in where
    assert where.endswith(" in draft")


@pytest.mark.full
def test_pytest_does_not_succeed_where_a_proposer_ends_the_process(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "specdec.testing"]
    command += ["--proposer", "hostile_proposers:EndsTheProcess", "--proposer-level", "basic"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=600)
    assert done.returncode == 1
    assert "running  propose of hostile_proposers:EndsTheProcess" in done.stderr
