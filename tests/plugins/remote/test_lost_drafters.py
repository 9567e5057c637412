"""A drafter that is lost comes back: at once if it was well, and else after pauses that grow. No step waits for it."""

from __future__ import annotations

import time
from collections import Counter
from threading import Event

import pytest
import zmq
from drafter_servers import hosted_with, serving
from inside import proposer_of
from isolated_proposers import RepeatsLast
from test_remote import GREEDY, NGRAM, PROMPTS, engine, remote, stub, until

from specdec.plugins.remote.connection import UNREAD_MESSAGES, Connection
from specdec.plugins.remote.drafter import FIRST_PAUSE, LONGEST_PAUSE, PROVEN_AFTER, At, Drafter
from specdec.sdk import Needs
from specdec.sdk.extensions import State
from specdec.sdk.wire import PROTOCOL, Ask, Call, Drafts, Hello, Returned, Unknown, Welcome, encode


class Clock:
    """Stands still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/socket"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lost(address, clock):
    """A drafter that was reached, and whose server is gone."""
    drafter = Drafter(At(address), Hello(PROTOCOL, 10, 10, 1), Counter(), clock)
    with stub(address, answered):
        drafter.begin(10)
    until(lambda: drafter.receive(0) is None and not drafter._up)
    yield drafter
    drafter.close()


def answered(ask):
    return [encode(Drafts(ask.number, []))]


def ask(drafter, number=1):
    """Its answer."""
    drafter.send(Ask(number, []))
    return drafter.receive(10)


def ends(drafter) -> None:
    until(lambda: drafter.receive(0) is None and not drafter._up)


def test_one_that_answered_comes_back_at_once_however_often_it_ends(lost, address) -> None:
    """The clock stands still, so there is no pause."""
    for _ in range(6):
        with stub(address, answered):
            until(lambda: lost.is_up)
            assert isinstance(ask(lost), Drafts)
        ends(lost)
    assert lost._figures == {"outages": 7, "returns": 6}


def test_one_that_ends_before_it_answers_comes_back_after_pauses_that_grow(lost, address, clock) -> None:
    pauses = []
    for _ in range(4):
        with stub(address, answered):
            until(lambda: lost.is_up)
        ends(lost)
        pauses.append(lost._next_try - clock.now)
        assert not lost.is_up
        clock.now = lost._next_try
    assert pauses == [FIRST_PAUSE * each for each in (1, 3, 7, 15)]


def test_one_that_is_away_for_days_comes_back(lost, address, clock) -> None:
    for _ in range(3000):
        lost.lose("nobody is there")
    assert lost._next_try - clock.now == LONGEST_PAUSE
    clock.now = lost._next_try
    with stub(address, answered):
        until(lambda: lost.is_up)
        assert isinstance(ask(lost), Drafts)


@pytest.mark.parametrize("talk", [lambda asked: [b"nonsense"], lambda asked: [encode(Returned(asked.number))]])
def test_one_that_talks_nonsense_or_hangs_has_to_answer_more_often(lost, address, clock, talk) -> None:
    """Each time it costs the texts sent anew, or a wait."""

    def answers(asked):
        return answered(asked) if asked.number else talk(asked)

    for pause, num_answers in ((1, 1), (3, 3), (0, PROVEN_AFTER)):
        with stub(address, answers):
            until(lambda: lost.is_up)
            assert all(isinstance(ask(lost), Drafts) for _ in range(num_answers))
            if isinstance(ask(lost, 0), Returned):
                lost.lose("it has not answered")
            assert not lost._up
        assert lost._next_try - clock.now == FIRST_PAUSE * pause
        clock.now = lost._next_try


class AtOnce(At):
    """A place whose drafter welcomes whoever connects, before anything else is done."""

    def connect(self, most_bytes):
        connection = super().connect(most_bytes)
        connection.receive = lambda seconds: Welcome(PROTOCOL, "p", 1)
        return connection

    def require_own(self): ...


def test_a_loss_is_seen_also_where_the_drafter_is_back_at_once(address, clock) -> None:
    """Or a step would wait for the answer to a question that nobody has."""
    drafter = Drafter(AtOnce(address), Hello(PROTOCOL, 10, 10, 1), Counter(), clock)
    drafter.begin(10)
    assert drafter.is_up
    drafter.lose("so")
    assert [drafter.is_up, drafter.is_up] == [False, True]
    drafter.close()


def test_a_server_cannot_fill_the_memory_of_an_engine_that_does_not_read(address) -> None:
    large = bytes(2**20)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger, server.sndhwm, server.router_mandatory = 0, 1, True
        server.bind(address)
        connection = Connection(address)
        connection.send(Hello(PROTOCOL, 10, 10, 1))
        client, _ = server.recv_multipart()
        sent, end = 0, time.monotonic() + 3
        while time.monotonic() < end and sent < 200:
            try:
                server.send_multipart([client, large], zmq.DONTWAIT)
                sent += 1
            except zmq.Again:
                time.sleep(0.01)
        connection.close()
    assert UNREAD_MESSAGES <= sent < 4 * UNREAD_MESSAGES


def test_a_loss_that_only_metrics_saw_is_told_to_the_next_step(address) -> None:
    """Or it would go on waiting for an answer to what the drafter before was asked."""
    with stub(address, lambda asked: []):
        llm = engine(remote(address, deadline_ms=0.001, hang_seconds=600))
        llm.engine.add_request(PROMPTS[0], GREEDY, "a")
        conversation = proposer_of(llm)._conversation
        while conversation._question is None:
            llm.engine.step()
    with stub(address, answered):
        until(lambda: llm.get_metrics() and conversation.figures["returns"] == 1)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        assert conversation.figures["asked"] > 1
        llm.close()


def test_an_answer_that_came_while_nobody_looked_is_taken_however_late(address) -> None:
    """Engines rest between requests for longer than a drafter may hang."""
    said = Event()

    def slowly(ask):
        time.sleep(0.05)
        yield from answered(ask)
        said.set()

    with stub(address, slowly):
        llm = engine(remote(address, deadline_ms=0.001, hang_seconds=0.3))
        llm.engine.add_request(PROMPTS[0], GREEDY, "a")
        conversation = proposer_of(llm)._conversation
        while conversation._question is None:
            llm.engine.step()
        said.wait(10)
        time.sleep(0.4)
        llm.engine.step()
        assert conversation.figures["outages"] == 0
        assert conversation.figures["late"] == 1
        llm.close()


def test_a_server_that_is_left_behind_holds_none_of_its_requests(address) -> None:
    """They would take its slots from the same engine."""
    hosted = hosted_with(NGRAM)
    with serving(hosted, address):
        llm = engine(remote(address))
        llm.engine.add_request(PROMPTS[0], GREEDY, "a")
        llm.engine.step()
        proposer_of(llm)._conversation._drafter.lose("it has not answered")
        until(lambda: not hosted.names(""))
        llm.close()


def test_an_engine_that_is_forgotten_for_being_idle_comes_back_at_once(lost, address, clock) -> None:
    """However often. One that answers nothing but that it knows nobody comes back after pauses that grow."""
    pauses = []
    for num_answers in (1, 1, 1, 0, 0, 0):
        with stub(address, lambda ask: answered(ask) if ask.number else [encode(Unknown())]):
            until(lambda: lost.is_up)
            assert all(isinstance(ask(lost), Drafts) for _ in range(num_answers))
            assert ask(lost, 0) is None
        pauses.append(lost._next_try - clock.now)
        clock.now = lost._next_try
    assert pauses == [0, 0, 0, *(FIRST_PAUSE * each for each in (1, 3, 7))]


class LoadsSlowly(RepeatsLast):
    """Reads its state when the test lets it."""

    needs = Needs(state="shared", extensions=(State(),))
    may_load = Event()

    def save(self, path): ...

    def load(self, path):
        self.may_load.wait(5)
        raise ValueError("it is damaged")


def test_one_that_comes_back_is_up_when_it_knows_again_what_changed_it(address, tmp_path) -> None:
    """No step waits for that, and it is not taken for one that hangs."""
    config = {"method": f"{__name__}:LoadsSlowly", "num_speculative_tokens": 1}
    drafter = Drafter(At(address), Hello(PROTOCOL, 4096, 512, 1), Counter())
    with serving(hosted_with(config), address, keeps_state=True):
        drafter.begin(10)
        drafter.first_words["save"] = Call(0, "load", str(tmp_path))
        drafter.lose("it was killed")
        end = time.monotonic() + 0.5
        until(lambda: drafter.is_up or time.monotonic() > end)
        assert not drafter.is_up
        LoadsSlowly.may_load.set()
        until(lambda: drafter.is_up)
        assert drafter.failed is not None
        assert "it is damaged" in drafter.failed.summary
        drafter.close()
