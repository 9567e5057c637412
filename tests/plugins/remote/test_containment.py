"""Whatever becomes of a proposer's process, its server or the disk: the text is equal, and drafts come back."""

from __future__ import annotations

import os
import re
import resource
import signal
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq
from drafter_servers import Client, inner, served
from inside import proposer_of
from test_isolation import GREEDY, NGRAM, PROMPTS, engine, figures, is_alive, mine, processes_of, texts, until
from test_remote import remote

from specdec import SamplingParams
from specdec.plugins.remote.child import KILL_SECONDS
from specdec.sdk import ConfigError, ProposerError
from specdec.sdk.wire import Ask, Row, Start, Welcome

FEW = {"max_num_seqs": 8, "num_kv_blocks": 40, "block_size": 16, "max_model_len": 256}
LONG = SamplingParams(temperature=0, max_tokens=160, ignore_eos=True)
EIGHT = [f"{prompt}# {number}\n" for number in range(4) for prompt in PROMPTS[:2]]
NO_ROOM = (0, resource.RLIM_INFINITY)  # bytes of a file: what a full disk is to a process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts(engine())


class Run(NamedTuple):
    """What became of an engine's process, and of the drafts."""

    wrong: list[str]  # requests
    killed: int
    backs: list[float]  # seconds from a kill to the next drafts
    accepted: float  # of the drafts that were verified
    figures: dict[str, float]


def run(llm, steps, every, expected) -> Run:
    """So many steps with drafts, and those without until a killed process is back: ten requests at a time, eight run.

    every: steps with drafts before each kill; 0: there is none.
    """
    counts, names, requests, backs = proposer_of(llm)._conversation.figures, count(), {}, []
    killed, with_drafts, killed_at = 0, 0, 0.0
    while True:
        goes_on = killed * every + with_drafts < steps
        while goes_on and len(llm.engine._requests) < 10:
            name = next(names)
            llm.engine.add_request(EIGHT[name % 8], LONG, str(name))
            requests[name] = llm.engine._requests[str(name)]
        if every and with_drafts == every and goes_on:
            os.kill(processes_of(llm)[1][0], signal.SIGKILL)
            killed, with_drafts, killed_at = killed + 1, 0, time.monotonic()
        if not llm.engine.step():
            break
        if counts["returns"] == killed:
            with_drafts += 1
            if killed and with_drafts == 1:
                backs.append(time.monotonic() - killed_at)
    shown = {metric.name.removeprefix("specdec:"): metric for metric in llm.get_metrics()}
    drafted, accepted = (shown[f"spec_decode_num_{each}_tokens"].value for each in ("draft", "accepted"))
    assert sum(shown["spec_decode_num_accepted_tokens_per_pos"].values) == accepted
    assert shown["num_preemptions"].value > 0
    wrong = [str(name) for name, each in requests.items() if text_of([each]) != [expected[name % 8]]]
    return Run(wrong, killed, backs, accepted / drafted, figures(llm))


def text_of(requests) -> list[list[int]]:
    return [list(each.token_ids[len(each.prompt_token_ids) :]) for each in requests]


@pytest.mark.full
def test_killed_fifty_steps_after_each_return_at_batch_eight_with_preemption() -> None:
    steps = 2000
    expected = texts(engine(**FEW), EIGHT, LONG)
    with engine(NGRAM | {"isolation": "process"}, **FEW) as llm:
        before = run(llm, 150, 0, expected)
    llm = engine(NGRAM | {"isolation": "process"}, **FEW)
    after = run(llm, steps, 50, expected)
    pid, children, directory = processes_of(llm)
    llm.close()
    print(f"{after.killed} kills, back after {sorted(after.backs)} s, {after.accepted:.3f} of {before.accepted:.3f}")
    assert after.wrong == before.wrong == []
    assert after.killed == steps // 50 - 1
    shown = after.figures
    assert shown["outages"] == shown["restarts"] == after.killed
    assert after.killed - 1 <= shown["returns"] <= after.killed
    assert shown["asked"] - after.killed <= shown["in_time"] + shown["late"] <= shown["asked"]
    assert shown["errors"] == shown["no_slot"] == 0
    assert after.accepted >= 0.8 * before.accepted
    assert not any(map(is_alive, [pid, *children]))
    assert not directory.exists()


# Stopped


def requests_of(llm):
    """Those of `PROMPTS`, added."""
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add_request(prompt, GREEDY, f"{number}")
    return list(llm.engine._requests.values())


def steps_of(llm):
    """Steps to the end: the seconds that each waited for drafts, and those that it took."""
    conversation, goes_on = proposer_of(llm)._conversation, True
    while goes_on:
        waited, begin = conversation._waited, time.monotonic()
        goes_on = llm.engine.step()
        yield conversation._waited - waited, time.monotonic() - begin


@pytest.mark.full
@pytest.mark.parametrize(("deadline_ms", "longest"), [(None, 2.9), (20, 0.9)])  # s; a hang is one
def test_one_that_is_stopped_costs_a_wait_that_is_bounded_and_said(deadline_ms, longest, plain, caplog) -> None:
    llm = engine(NGRAM | {"isolation": {"kind": "process", "hang_seconds": 1, "deadline_ms": deadline_ms}})
    _, [child], _ = processes_of(llm)
    requests, waits = requests_of(llm), []
    for number, (wait, _) in enumerate(steps_of(llm)):
        waits.append(wait)
        if number == 3:
            os.kill(child, signal.SIGSTOP)
    assert text_of(requests) == plain
    until(lambda: texts(llm) == plain and figures(llm)["returns"] == 1)
    assert max(waits) < longest
    assert not is_alive(child)
    [warning] = [each.getMessage() for each in caplog.records if "SD-W331" in each.getMessage()]
    assert "it has not answered for 1 s" in warning
    assert "it ended by SIGKILL" in warning
    llm.close()


@pytest.mark.full
def test_one_that_goes_on_before_it_is_taken_for_lost_stays(plain) -> None:
    llm = engine(NGRAM | {"isolation": {"kind": "process", "deadline_ms": 1}})
    _, [child], _ = processes_of(llm)
    requests = requests_of(llm)
    for number, _ in enumerate(steps_of(llm)):
        if number in (3, 8):
            os.kill(child, signal.SIGSTOP if number == 3 else signal.SIGCONT)
            time.sleep(0.2)
    assert text_of(requests) == plain
    until(lambda: texts(llm) == plain and figures(llm)["late"] > 0)
    assert figures(llm)["outages"] == 0
    assert processes_of(llm)[1] == [child]
    llm.close()


@pytest.mark.full
def test_a_keeper_that_is_stopped_too_is_ended_and_no_step_waits_for_it(plain) -> None:
    llm = engine(NGRAM | {"isolation": {"kind": "process", "hang_seconds": 0.3}})
    keeper, [child], directory = processes_of(llm)
    requests, longest = requests_of(llm), 0.0
    for number, (_, seconds) in enumerate(steps_of(llm)):
        longest = max(longest, seconds)
        if number == 3:
            os.kill(keeper, signal.SIGSTOP), os.kill(child, signal.SIGSTOP)
    assert text_of(requests) == plain
    assert longest < 0.9 * KILL_SECONDS
    until(lambda: texts(llm) == plain and figures(llm)["returns"] == 1)
    assert not any(map(is_alive, [keeper, child]))
    assert not directory.exists()
    llm.close()


# A full disk


@pytest.mark.full
def test_state_that_finds_no_room_is_an_error_and_what_was_saved_stays(tmp_path, plain) -> None:
    llm = engine(mine("Learns"))
    _, [child], _ = processes_of(llm)
    assert texts(llm) == plain
    llm.save_proposer_state(tmp_path / "state")
    saved = {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()}
    resource.prlimit(child, resource.RLIMIT_FSIZE, NO_ROOM)
    with pytest.raises((ProposerError, ConfigError), match="File too large"):
        llm.save_proposer_state(tmp_path / "state")
    assert saved == {path: path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()}
    assert texts(llm) == plain
    assert figures(llm)["outages"] == 0
    llm.close()


@pytest.mark.full
def test_a_process_that_cannot_be_started_is_one_that_is_not_there(tmp_path, monkeypatch, plain) -> None:
    """Its keeper is gone as well, and there is no room for the directory of another."""
    llm = engine(NGRAM | {"isolation": "process"})
    keeper, [child], _ = processes_of(llm)
    resource.prlimit(keeper, resource.RLIMIT_FSIZE, NO_ROOM)
    os.kill(child, signal.SIGKILL)
    until(lambda: texts(llm) == plain and figures(llm)["returns"] == 1)
    _, [child], _ = processes_of(llm)
    with monkeypatch.context() as full:
        full.setattr(tempfile, "tempdir", str(tmp_path / "full"))
        os.kill(keeper, signal.SIGKILL)
        until(lambda: not is_alive(child))
        assert texts(llm) == plain
        assert not figures(llm)["up"]
    until(lambda: texts(llm) == plain and figures(llm)["returns"] == 2)
    llm.close()


# A server


def there(llm) -> dict[str, float]:
    return {m.name.removeprefix("specdec:proposer_remote_"): m.value for m in llm.get_metrics() if "_remote_" in m.name}


@pytest.mark.full
@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:*", "ipc"])
def test_a_server_that_is_killed_and_comes_back_as_another(listen, tmp_path, plain) -> None:
    """Another process, with another proposer, at the same address: it was upgraded, or moved to another machine."""
    with served("ngram", f"ipc://{tmp_path}/socket" if listen == "ipc" else listen) as (process, address):
        llm = engine(remote(address, hang_seconds=5))
        requests = requests_of(llm)
        for number, _ in enumerate(steps_of(llm)):
            if number == 3:
                process.kill()
    assert text_of(requests) == plain
    assert there(llm)["outages"] == 1
    with served("suffix", address):
        until(lambda: texts(llm) == plain and there(llm)["up"])
        before = there(llm)["in_time"]
        assert texts(llm) == plain
        assert there(llm)["in_time"] > before
        assert there(llm)["returns"] == 1
        llm.close()


@pytest.mark.full
def test_a_server_that_finds_no_room_for_its_state_says_so_and_keeps_the_earlier(tmp_path, plain) -> None:
    state = tmp_path / "state"
    for room in (True, False):
        with served("suffix", f"ipc://{tmp_path}/socket", state_dir=str(state)) as (process, address):
            llm = engine(remote(address))
            assert texts(llm) == plain
            llm.close()
            if not room:
                saved = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
                resource.prlimit(inner(process), resource.RLIMIT_FSIZE, NO_ROOM)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
            assert (process.returncode == 0) == room
    assert "File too large" in said
    assert saved
    assert saved == {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}


def mebibytes_of(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) // 1024


@pytest.mark.full
def test_a_client_that_never_reads_takes_no_memory_and_no_turns_of_others(tmp_path) -> None:
    names = [Row(f"{number:0500}", 0, [1], 1) for number in range(4000)]  # two megabytes, and the answer too
    few = {"rcvhwm": 1, "sndhwm": 4, "rcvbuf": 4096}
    with (
        served("ngram", "tcp://127.0.0.1:*") as (process, address),
        Client(address) as good,
        Client(address, **few) as slow,
    ):
        assert isinstance(good.hello(), Welcome)
        assert isinstance(slow.hello(), Welcome)
        good.say(Start("a", [1, 2, 3, 4, 5, 1, 2]))
        before, said, longest = mebibytes_of(inner(process)), 0, 0.0
        for number in range(60):
            while slow.socket.poll(0, zmq.POLLOUT) and said < 10 * number:
                said += 1
                slow.say(Ask(said, names))
            begin = time.monotonic()
            good.say(Ask(number, [Row("a", 7 + number, [3], 1)]))
            assert good.hear(30).number == number
            longest = max(longest, time.monotonic() - begin)
        grown = mebibytes_of(inner(process)) - before
    print(f"{said} questions unread, {grown} MiB, {longest:.2f} s")
    assert said > 50
    assert grown < 150
    assert longest < 10
