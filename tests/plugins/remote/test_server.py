"""A server: sessions apart, limits, refusals, hostile clients; its proposer sees what an engine would show it."""

from __future__ import annotations

import os
import random
import socket
import stat
import tracemalloc

import pytest
from drafter_servers import Client, hosted_with, serving

from specdec.adapters.serving.sessions import Limits, Session, Sessions
from specdec.plugins.remote.connection import Connection
from specdec.sdk import ConfigError, Draft, Needs, Refusal
from specdec.sdk.wire import (
    DRAFTED,
    FULL,
    MAX_MESSAGE_BYTES,
    UNKNOWN,
    Ask,
    Bye,
    Drafts,
    End,
    Failed,
    Hello,
    Refused,
    Row,
    Start,
    Unknown,
    Welcome,
    encode,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "proposer_config": {"prompt_lookup_min": 1}}
REPEATING = [1, 2, 3, 4, 5, 1, 2]


class Raises:
    """Drafts the newest token, and fails where that is 13."""

    def __init__(self, config) -> None: ...

    def propose(self, step):
        if 13 in step.newest_token.tolist():
            raise ValueError("thirteen")
        return Draft(step.newest_token[:, None].expand(-1, step.width), step.budget)


class ReadsStates:
    """Reads hidden states, and never gets as far."""

    needs = Needs(hidden_states=("final",))

    def __init__(self, config) -> None: ...

    def propose(self, step): ...


def raising():
    return hosted_with({"method": f"{__name__}:Raises", "num_speculative_tokens": 2})


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return f"ipc://{tmp_path_factory.mktemp('drafter')}/socket"


@pytest.fixture(scope="module")
def served(address):
    with serving(hosted_with(NGRAM), address, Limits(max_sessions=3)) as server:
        yield server


def drafts_of(client, number, *rows):
    client.say(Ask(number, list(rows)))
    answer = client.hear()
    assert isinstance(answer, Drafts)
    assert answer.number == number
    return [(row.state, row.length, row.tokens) for row in answer.rows]


def test_a_request_is_drafted_for_step_by_step(served, address) -> None:
    with Client(address) as client:
        assert client.hello() == Welcome(1, "specdec-sdk:ngram", 4)
        client.say(Start("a", REPEATING))
        assert drafts_of(client, 1, Row("a", 7, [3], 4)) == [(DRAFTED, 8, [4, 5, 1, 2])]
        assert drafts_of(client, 2, Row("a", 8, [4, 5, 9], 4, 4, 2)) == [(DRAFTED, 11, [])]
        assert drafts_of(client, 3, Row("a", 11, [1], 2, 0, 0)) == [(DRAFTED, 12, [2, 3])]
        client.say(End("a", "stop", 12, []))
        assert drafts_of(client, 4, Row("a", 12, [1], 4)) == [(UNKNOWN, 13, [])]
        client.say(Bye())


def test_a_row_that_does_not_follow_is_answered_with_unknown(served, address) -> None:
    with Client(address) as client:
        client.hello()
        client.say(Start("a", REPEATING))
        assert drafts_of(client, 1, Row("a", 9, [3], 4), Row("b", 0, [1], 4)) == [(UNKNOWN, 10, []), (UNKNOWN, 1, [])]
        assert drafts_of(client, 2, Row("a", 7, [3], 4))[0][0] == DRAFTED
        client.say(Bye())


def test_clients_with_equal_names_of_requests_are_apart(served, address) -> None:
    with Client(address) as one, Client(address) as two:
        one.hello(), two.hello()
        one.say(Start("a", REPEATING))
        two.say(Start("a", [7, 8, 9, 7]))
        assert drafts_of(two, 1, Row("a", 4, [8], 1)) == [(DRAFTED, 5, [9])]
        assert drafts_of(one, 1, Row("a", 7, [3], 1)) == [(DRAFTED, 8, [4])]
        one.say(Bye())
        assert drafts_of(two, 2, Row("a", 5, [9], 1)) == [(DRAFTED, 6, [7])]
        two.say(Bye())


@pytest.mark.parametrize(
    "changes", [{"protocol": 2}, {"vocab_size": 32_000}, {"max_model_len": 10**6}], ids=lambda each: next(iter(each))
)
def test_an_engine_that_does_not_fit_is_refused_with_both_sides(served, address, changes) -> None:
    with Client(address) as client:
        refused = client.hello(**changes)
        assert isinstance(refused, Refused)
        assert refused.code == "SD-E332"
        assert any("here" in fact and "there" in fact for fact in refused.facts.values())
        assert "--max-model-len" in refused.facts["fix"], "the same target may be served for shorter texts"


def test_more_clients_than_allowed_are_refused(served, address) -> None:
    clients = [Client(address) for _ in range(4)]
    assert [type(client.hello()) for client in clients] == [Welcome, Welcome, Welcome, Refused]
    for client in clients:
        client.say(Bye())
        client.__exit__()


def test_without_hello_a_question_is_answered_with_unknown(served, address) -> None:
    with Client(address) as client:
        client.say(Start("a", REPEATING))
        client.say(Ask(1, [Row("a", 7, [3], 4)]))
        assert client.hear() == Unknown()


@pytest.mark.parametrize(
    "said",
    [
        b"nonsense",
        Start("a", [4096]),
        Start("a", [1] * 5000),
        Start("a", [1], "", "no json"),
        Start("a", [1], "", "[" * 10_000),
        Start("a", [1], "", "[]"),
        Ask(1, [Row("x", 0, [1], 1), Row("x", 0, [1], 1)]),
    ],
    ids=["bytes", "token", "length", "options", "depth", "list", "twice"],
)
def test_a_client_that_sends_nonsense_is_forgotten_and_others_are_not(served, address, said) -> None:
    with Client(address) as good, Client(address) as bad:
        good.hello(), bad.hello()
        good.say(Start("a", REPEATING))
        bad.say(said)
        refused = bad.hear()
        assert isinstance(refused, Refused)
        assert refused.code == "SD-E331"
        bad.say(Ask(2, []))
        assert bad.hear() == Unknown()
        assert drafts_of(good, 1, Row("a", 7, [3], 1)) == [(DRAFTED, 8, [4])]
        good.say(Bye())


def test_fuzzed_messages_leave_a_server_that_serves(served, address) -> None:
    chance = random.Random(1)
    messages = [Start("a", REPEATING), Ask(1, [Row("a", 7, [3], 4)]), End("a", "stop", 8, []), Hello(1, 4096, 512, 4)]
    with Client(address) as bad, Client(address) as good:
        for _ in range(1500):
            data = bytearray(encode(chance.choice(messages)))
            if chance.random() < 0.7:
                data[chance.randrange(len(data))] = chance.randrange(256)
            bad.say(bytes(data))
            while bad.hear(0) is not None:
                pass
        bad.say(Bye())
        assert isinstance(good.hello(), Welcome)
        good.say(Start("a", REPEATING))
        assert drafts_of(good, 1, Row("a", 7, [3], 1)) == [(DRAFTED, 8, [4])]
        good.say(Bye())


def test_a_message_beyond_the_limit_ends_the_connection_alone(served, address) -> None:
    with Client(address) as bad, Client(address) as good:
        bad.hello(), good.hello()
        bad.say(b"x" * (MAX_MESSAGE_BYTES + 1))
        good.say(Start("a", REPEATING))
        assert drafts_of(good, 1, Row("a", 7, [3], 1)) == [(DRAFTED, 8, [4])]
        good.say(Bye())


def test_a_client_that_never_reads_is_forgotten_and_others_are_served(served, address) -> None:
    with Client(address, rcvhwm=1) as slow, Client(address) as good:
        slow.hello()
        for number in range(2000):
            slow.say(Ask(number, [Row("x" * 500, 0, [1], 1)] if number % 2 else []))
        good.hello()
        good.say(Start("a", REPEATING))
        assert drafts_of(good, 1, Row("a", 7, [3], 1)) == [(DRAFTED, 8, [4])]
        good.say(Bye()), slow.say(Bye())


def test_requests_beyond_the_slots_are_answered_with_full(tmp_path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with serving(hosted_with(NGRAM, max_num_seqs=1), address), Client(address) as client:
        client.hello()
        client.say(Start("a", REPEATING))
        client.say(Start("b", REPEATING))
        found = drafts_of(client, 1, Row("a", 7, [3], 1), Row("b", 7, [3], 1))
        assert found == [(DRAFTED, 8, [4]), (FULL, 8, [])]
        client.say(End("a", "length", 8, []))
        client.say(Start("b", REPEATING))
        assert drafts_of(client, 2, Row("b", 7, [3], 1)) == [(DRAFTED, 8, [4])]


def test_a_client_with_all_slots_gives_some_up_to_others_until_they_have_as_many(tmp_path) -> None:
    address, hosted = f"ipc://{tmp_path}/socket", hosted_with(NGRAM, max_num_seqs=4)
    with serving(hosted, address), Client(address) as many, Client(address) as few:
        many.hello(), few.hello()
        rows = [Row(name, 7, [3], 1) for name in "abcd"]
        for row in rows:
            many.say(Start(row.request_id, REPEATING))
        assert [state for state, *_ in drafts_of(many, 1, *rows)] == [DRAFTED] * 4
        for row in rows[:3]:
            few.say(Start(row.request_id, REPEATING))
        assert [state for state, *_ in drafts_of(few, 1, *rows[:3])] == [DRAFTED, DRAFTED, FULL]
        many.say(Start("d", [*REPEATING, 3]))
        rows = [Row(name, 8, [4], 1) for name in "abcd"]
        assert [state for state, *_ in drafts_of(many, 2, *rows)] == [DRAFTED, DRAFTED, FULL, FULL]
        few.say(End("a", "stop", 8, []))
        assert drafts_of(few, 2, Row("b", 8, [4], 1)) == [(DRAFTED, 9, [5])]
        many.say(Start("d", [*REPEATING, 3]))
        assert drafts_of(many, 3, Row("d", 8, [4], 1)) == [(DRAFTED, 9, [5])]


def test_an_error_of_the_proposer_goes_to_its_client_and_requests_begin_anew(tmp_path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with serving(raising(), address), Client(address) as client:
        client.hello()
        client.say(Start("a", [1, 2]))
        client.say(Ask(1, [Row("a", 2, [13], 2)]))
        failed = client.hear()
        assert isinstance(failed, Failed)
        assert (failed.number, failed.code) == (1, "SD-E210")
        assert "thirteen" in failed.summary
        assert "test_server.py" in failed.facts["where"]
        client.say(Start("a", [1, 2, 13]))
        assert drafts_of(client, 2, Row("a", 3, [5], 2)) == [(DRAFTED, 4, [5, 5])]


def test_requests_of_a_client_that_is_gone_are_ended_and_those_of_others_are_not(tmp_path) -> None:
    address, hosted = f"ipc://{tmp_path}/socket", hosted_with(NGRAM)
    with serving(hosted, address), Client(address) as one, Client(address) as two:
        for client in (one, two):
            client.hello()
            client.say(Start("b", REPEATING)), client.say(Start("a", REPEATING))
            drafts_of(client, 1, Row("a", 7, [3], 4))
        assert hosted.names("") == ["000001/a", "000001/b", "000002/a", "000002/b"]
        one.say(Bye())
        drafts_of(two, 2, Row("a", 8, [4], 4)), drafts_of(two, 3, Row("a", 9, [5], 4))
        assert hosted.names("") == ["000002/a", "000002/b"]


def test_requests_that_find_no_slot_leave_nothing_in_the_server(tmp_path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with serving(hosted_with(NGRAM, max_num_seqs=1), address), Client(address) as client:
        client.hello()
        client.say(Start("a", REPEATING))
        drafts_of(client, 1, Row("a", 7, [3], 4))
        tracemalloc.start()
        for number in range(4000):
            client.say(Start(f"{number:0500}", REPEATING))
        assert drafts_of(client, 2, Row("a", 8, [4], 4)) == [(DRAFTED, 9, [5, 1, 2, 3])]
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert kept < 2**19, "4000 names of 500 bytes are 2 MB"


def test_silent_clients_are_forgotten() -> None:
    now, ended = [0.0], []
    sessions = Sessions(Limits(max_sessions=2, idle_seconds=10), lambda: now[0], ended.append)
    hello = Hello(1, 10, 10, 1)
    old = sessions.open(b"old", hello)
    assert isinstance(old, Session)
    now[0] = 8.0
    sessions.open(b"new", hello)
    assert sessions.open(b"third", hello) is None
    now[0] = 11.0
    assert sessions.open(b"third", hello) is not None, "the old one gave way"
    assert ended == [old]
    assert sessions.get(b"old") is None


def test_the_socket_is_its_owners_alone(served, address) -> None:
    assert stat.S_IMODE(os.stat(address.removeprefix("ipc://")).st_mode) == 0o600


def test_a_proposer_that_reads_the_target_is_refused() -> None:
    with pytest.raises(Refusal, match="hidden_states"):
        hosted_with({"method": f"{__name__}:ReadsStates", "num_speculative_tokens": 2})


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5570", "tcp://10.0.0.1:1", "tcp://*:5570", "ipc://@name", "here"])
def test_an_address_that_others_reach_is_refused(address) -> None:
    with pytest.raises(ConfigError, match="SD-E333"), serving(hosted_with(NGRAM), address):
        pass


def test_an_ipv6_address_is_served() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(hosted_with(NGRAM), "tcp://[::1]:*") as server:
        connection = Connection(server.address)
        connection.send(Hello(1, 4096, 512, 4))
        assert isinstance(connection.receive(10), Welcome)
        connection.close()


def test_an_address_that_cannot_be_had_is_named(tmp_path) -> None:
    with (
        pytest.raises(ConfigError, match="cannot be listened to"),
        serving(hosted_with(NGRAM), f"ipc://{tmp_path}/a/b"),
    ):
        pass
