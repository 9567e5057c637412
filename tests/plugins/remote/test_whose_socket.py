"""Whose socket an engine speaks to, and a server takes: prompts go to nobody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter

import pytest
import zmq
from drafter_servers import Client, hosted_with, serving
from test_remote import stub
from test_server import NGRAM, REPEATING, drafts_of

from specdec.plugins.remote.connection import Connection, LostError
from specdec.plugins.remote.drafter import At, Drafter
from specdec.sdk import ConfigError
from specdec.sdk.wire import DRAFTED, PROTOCOL, Hello, Row, Start

HELLO = Hello(PROTOCOL, 4096, 512, 4)
SOMEBODY = 65534


def drafter_at(address) -> Drafter:
    return Drafter(At(address), HELLO, Counter())


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/socket"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a socket to somebody else")
def test_a_socket_of_somebody_else_is_not_spoken_to(address, tmp_path) -> None:
    heard = []
    with stub(address, heard.append):
        path = tmp_path / "socket"
        while not path.exists():
            os.sched_yield()
        os.chown(path, SOMEBODY, SOMEBODY)
        with pytest.raises(ConfigError, match=rf"SD-E334[\s\S]*user {SOMEBODY} owns {path}: expected user 0"):
            drafter_at(address).begin(10)
    assert heard == []


def test_whoever_answers_where_no_socket_is_any_more_is_not_told_of_requests(address, tmp_path) -> None:
    """It may have taken the place of one that was not there yet, and given it back."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        server.bind(address)
        connection = At(address).connect(2**20)
        (tmp_path / "socket").unlink()
        with pytest.raises(LostError, match="whose socket"):
            At(address).require_own()
        connection.close()


def test_a_server_leaves_the_place_of_one_that_answers(address) -> None:
    with serving(hosted_with(NGRAM), address), Client(address) as client:
        client.hello()
        with pytest.raises(ConfigError, match=r"SD-E333[\s\S]*a server answers there already"), serving(None, address):
            pass
        client.say(Start("a", REPEATING))
        assert drafts_of(client, 1, Row("a", 7, [3], 1)) == [(DRAFTED, 8, [4])]


def test_a_server_takes_the_place_of_one_that_is_gone(address, tmp_path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "socket"))
    with serving(hosted_with(NGRAM), address), Client(address) as client:
        assert client.hello().proposer == "specdec-sdk:ngram"


def test_what_cannot_be_connected_to_is_a_drafter_that_is_not_there() -> None:
    address = "ipc:///" + "x" * 200
    with pytest.raises(LostError, match="no socket can be opened"):
        Connection(address)
    with pytest.raises(ConfigError, match="SD-E334"):
        drafter_at(address).begin(1)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 3, 15])
def test_a_process_with_too_many_open_files_goes_on_without_a_connection(spare) -> None:
    """libzmq itself ends a process that can open one file, and not the next."""
    code = f"""
import os, resource
from specdec.plugins.remote.connection import Connection, LostError
Connection("ipc:///nowhere/at/all").close()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    for _ in range({spare}):
        os.close(held.pop())
try:
    Connection("ipc:///nowhere/at/all")
except LostError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (
        0,
        "no socket can be opened: [Errno 24] Too many open files: '/dev/null'\n",
    )
