"""Checks in processes of their own: the same results, and a proposer that ends its process fails a check by name."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from specdec.sdk import Draft, ProposerBase
from specdec.testing import check_proposer
from specdec.testing.isolated import in_a_fork


class RepeatsLast(ProposerBase):
    """Drafts the newest token."""

    def propose(self, step):
        return Draft(step.newest_token[:, None].expand(-1, step.width), step.budget)


class Bad(RepeatsLast):
    """Drafts one token too few, with the length of all."""

    def propose(self, step):
        return Draft(step.newest_token[:, None].expand(-1, max(step.width - 1, 0)), step.budget)


class Exits(RepeatsLast):
    """Ends the process as if all were well."""

    def propose(self, step):
        os._exit(0)


class Crashes(RepeatsLast):
    """Reads what is nowhere."""

    def propose(self, step):
        ctypes.string_at(0)


class ExitsAtAStart(RepeatsLast):
    """Ends the process when a request begins."""

    def on_start(self, request):
        os._exit(7)


class Deaf(RepeatsLast):
    """Never comes back, and cannot be interrupted. Its threads have longer stacks than are kept."""

    def propose(self, step):
        for _ in range(30):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # in every thread: a mask would be one thread's
        while True:
            signal.pause()


@pytest.mark.parametrize("proposer", [RepeatsLast, Bad])
def test_results_are_those_of_one_process(proposer) -> None:
    inside = check_proposer(proposer, level="basic")
    apart = check_proposer(proposer, level="basic", isolation="process")
    assert [(each.check, each.status, each.cause) for each in apart] == [
        (each.check, each.status, each.cause) for each in inside
    ]
    assert {each.status for each in apart} <= {"passed", "skipped"} or proposer is Bad


@pytest.mark.parametrize(
    ("proposer", "how", "call"),
    [
        (Exits, "with exit status 0", "propose"),
        (Crashes, "by SIGSEGV", "propose"),
        (ExitsAtAStart, "with exit status 7", "on_start"),
    ],
)
def test_a_proposer_that_ends_its_process_fails_a_check_by_name(proposer, how, call) -> None:
    found = check_proposer(proposer, level="basic", isolation="process")
    failed = [each for each in found if each.status == "failed"]
    assert failed
    assert failed[0].facts["found"] == f"it ended {how}"
    assert f"{call} of {__name__}:{proposer.__name__}" in failed[0].facts["running"]
    assert "isolation='process'" in failed[0].facts["reproduce"]
    assert ("test_isolated.py" in failed[0].facts["stack"]) == (proposer is Crashes)
    assert found[-1].check != failed[0].check, "others were tried too"


def test_the_stack_of_a_crash_is_told_where_a_library_took_the_signal() -> None:
    # Libraries with backtraces of their own do so where they are imported; xgrammar brings one.
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = libc.signal(signal.SIGSEGV, signal.SIG_DFL)
    try:
        found = check_proposer(Crashes, level="basic", isolation="process")
    finally:
        libc.signal(signal.SIGSEGV, before)
    assert "in propose" in next(each for each in found if each.status == "failed").facts["stack"]


@pytest.mark.full
def test_one_that_cannot_be_interrupted_is_ended_and_the_next_one_runs() -> None:
    found = check_proposer(Deaf, only=["draft_form", "every_k"], isolation="process", timeout=5)
    assert [each.facts["found"] for each in found] == ["it ended because it took longer than 5 s"] * 2
    assert "in propose" in found[0].facts["stack"]
    assert [each.status for each in found] == ["failed", "explained"]


@pytest.mark.full
def test_the_command_has_it_too() -> None:
    command = [sys.executable, "-m", "specdec", "check", f"{__name__}:Exits", "--level", "basic"]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run(
        [*command, "--isolation", "process", "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert any(each["status"] == "failed" and "exit status 0" in each["facts"]["found"] for each in found)
    assert found[0]["check"] == "loads"


def test_a_fork_computes_where_the_process_itself_did_so_on_several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        many = torch.ones(1 << 20)
        total = int(many.add(many).sum())
        assert in_a_fork(lambda: str(int(many.add(many).sum())), 20) == f"{total}\n"
    finally:
        torch.set_num_threads(before)
