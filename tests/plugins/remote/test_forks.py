"""Forks, of a proposer's process and of an engine's: helpers are ended and end nothing, and nothing waits for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from drafter_servers import inner, served
from inside import proposer_of
from test_isolation import GREEDY, NGRAM, PROMPTS, engine, figures, is_alive, processes_of, until
from test_isolation import texts as texts_of
from test_remote import remote

MODULE = "forking_proposers"
PROCESS = {"isolation": "process"}


def mine(name, **keys):
    return {"method": f"{MODULE}:{name}", "num_speculative_tokens": 4} | keys


def told(llm, name) -> float:
    """A figure that the proposer publishes. On a busy machine it may tell it only later."""
    return next((each.value for each in llm.get_metrics() if each.name.endswith(f"_{name}")), 0.0)


def helper_of(llm) -> int:
    """One that is there."""
    found = [0]

    def is_there() -> bool:
        found[0] = int(told(llm, "helper"))
        return found[0] > 0 and is_alive(found[0])

    until(is_there)
    return found[0]


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.full
def test_a_helper_that_is_told_to_end_does_and_its_server_serves_on(tmp_path) -> None:
    with served(f"{MODULE}:HasHelper", f"ipc://{tmp_path}/socket") as (process, address):
        llm = engine(remote(address))
        for _ in range(2):
            assert texts_of(llm) != []
        until(lambda: told(llm, "ended") == 2 * len(PROMPTS))
        assert [m.value for m in llm.get_metrics() if m.name.endswith("_remote_outages")] == [0]
        llm.close()
        helpers = children_of(inner(process))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        until(lambda: not any(map(is_alive, helpers)))


@pytest.mark.full
def test_helpers_end_with_a_process_that_is_killed_or_closed() -> None:
    llm = engine(mine("HasHelper") | PROCESS)
    plain = texts_of(llm)
    until(lambda: told(llm, "ended") == len(PROMPTS))
    _, [child], _ = processes_of(llm)
    helpers = [helper_of(llm)]
    os.kill(child, signal.SIGKILL)
    until(lambda: not is_alive(helpers[0]))
    until(lambda: texts_of(llm) == plain and figures(llm)["returns"] == 1)
    helpers.append(helper_of(llm))
    assert is_alive(helpers[1])
    reports = os.fstat(proposer_of(llm)._child._keeper._said.fileno()).st_ino
    assert f"pipe:[{reports}]" not in {os.readlink(each) for each in Path(f"/proc/{helpers[1]}/fd").iterdir()}
    llm.close()
    until(lambda: not is_alive(helpers[1]))


@pytest.mark.full
def test_the_end_of_a_process_is_seen_while_a_helper_holds_its_connection() -> None:
    """A step that waits for a drafter that hangs would wait for ten minutes."""
    llm = engine(mine("HasOneOfItsOwn", isolation={"kind": "process", "hang_seconds": 600}))
    plain = texts_of(llm)
    _, [child], _ = processes_of(llm)
    helper = helper_of(llm)
    try:
        os.kill(child, signal.SIGKILL)
        assert texts_of(llm) == plain
        until(lambda: texts_of(llm) == plain and figures(llm)["returns"] == 1)
        assert is_alive(helper)
    finally:
        os.kill(helper, signal.SIGKILL)
        os.kill(helper_of(llm), signal.SIGKILL)
        llm.close()


def in_a_fork(llm, does) -> int:
    """What a fork of this process ends with, once it has done something with its copy of an engine."""
    pid = os.fork()
    if pid == 0:
        try:
            does(llm)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.full
def test_a_fork_of_the_engine_takes_nothing_away_when_it_ends() -> None:
    llm = engine(NGRAM | PROCESS)
    plain = texts_of(llm)
    keeper, [child], directory = processes_of(llm)
    finalizer = proposer_of(llm)._child._keeper._closing
    for does in (lambda llm: finalizer(), lambda llm: proposer_of(llm)._child.close()):
        assert in_a_fork(llm, does) == 0
        assert directory.is_dir()
    assert texts_of(llm) == plain
    assert processes_of(llm)[:2] == (keeper, [child])
    assert figures(llm)["outages"] == 0
    llm.close()
    assert not directory.exists()


@pytest.mark.full
def test_a_keeper_without_its_directory_gives_way_to_another() -> None:
    llm = engine(NGRAM | PROCESS)
    plain = texts_of(llm)
    _, [child], directory = processes_of(llm)
    for each in directory.iterdir():
        each.unlink()
    directory.rmdir()
    os.kill(child, signal.SIGKILL)
    until(lambda: not is_alive(child))
    until(lambda: texts_of(llm) == plain and figures(llm)["returns"] == 1)
    assert processes_of(llm)[2] != directory
    llm.close()


@pytest.mark.full
def test_files_of_weights_outlive_a_fork(tmp_path) -> None:
    from test_new_weights_there import DRAFT_MODEL, folder_of, without_mlp

    llm = engine(DRAFT_MODEL | {"isolation": {"kind": "process", "ahead": 0}})
    llm.update_proposer_weights(without_mlp()[0])
    assert in_a_fork(llm, lambda llm: proposer_of(llm)._remove()) == 0
    assert len(list(folder_of(llm).iterdir())) == 1
    assert len(llm.generate(PROMPTS[:1], GREEDY)) == 1
    llm.close()
