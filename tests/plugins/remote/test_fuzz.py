"""Changed messages: ten thousand to a server that runs, and ten thousand to an engine that drafts."""

from __future__ import annotations

import os
import random
from array import array
from itertools import count

import pytest
from drafter_servers import Client, hosted_with, serving
from msgspec.structs import astuple
from test_containment import mebibytes_of
from test_remote import GREEDY, PROMPTS, engine, remote, stub, texts

from specdec.plugins.remote import drafter
from specdec.sdk.wire import (
    DRAFTED,
    Ask,
    AskDrawn,
    Bye,
    Call,
    Distribution,
    Drafted,
    Drafts,
    Drawing,
    DrawnDraft,
    DrawnDrafts,
    End,
    Failed,
    Hello,
    Refused,
    Returned,
    Row,
    Start,
    Unknown,
    Welcome,
    encode,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "proposer_config": {"prompt_lookup_min": 1}}
REPEATING = [1, 2, 3, 4, 5, 1, 2]
MANY = 10_000
SETTLED = 2_000
"""Messages after which nothing grows any more."""
MOST_GROWTH = 32
"""In mebibytes."""

pytestmark = pytest.mark.full


def changed(data: bytes, chance: random.Random) -> bytes:
    """Some bytes differ, are missing, or are there twice."""
    found = bytearray(data)
    for _ in range(chance.randint(0, 3)):
        found[chance.randrange(len(found))] = chance.randrange(256)
    if chance.random() < 0.1:
        found = found[: chance.randrange(len(found))]
    if chance.random() < 0.05:
        found *= chance.randint(2, 50)
    return bytes(found)


def test_a_server_serves_on() -> None:
    chance = random.Random(2)
    messages = [
        Start("a", REPEATING),
        Start("b", REPEATING, "", '{"x": 1}'),
        Ask(1, [Row("a", 7, [3], 4)]),
        Ask(2, [Row("a", 8, [4, 5], 4, 4, 1), Row("b", 7, [3], 4)]),
        AskDrawn(2, [Row("a", 8, [4, 5], 4)], [Drawing([])]),
        End("a", "stop", 8, []),
        Hello(1, 4096, 512, 4),
        Call(3, "save", "/nowhere"),
        Call(4, "metrics"),
        Bye(),
    ]
    hosted, settled = hosted_with(NGRAM), 0
    with serving(hosted, "tcp://127.0.0.1:*") as server, Client(server.address) as bad:
        for number in range(MANY):
            if number == SETTLED:
                settled = mebibytes_of(os.getpid())
            bad.say(changed(encode(chance.choice(messages)), chance))
            while bad.hear(0) is not None:
                pass
            if number % 1000 == 0:
                with Client(server.address) as good:
                    assert isinstance(good.hello(), Welcome)
                    good.say(Start("a", REPEATING))
                    good.say(Ask(1, [Row("a", 7, [3], 1)]))
                    assert good.hear() == Drafts(1, [Drafted("a", 8, [4], DRAFTED)], good_micros)
                    good.say(Bye())
        assert len(hosted.names("")) <= 8
        assert mebibytes_of(os.getpid()) - settled < MOST_GROWTH


class _Any:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


good_micros = _Any()


@pytest.mark.parametrize(("method", "many", "settled_at"), [("greedy", MANY, SETTLED), ("probabilistic", 400, 200)])
def test_an_engine_writes_its_text(method, many, settled_at, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(drafter, "FIRST_PAUSE", 0.0)  # or pauses between connections would take the time
    plain, chance, sent, settled = texts(engine()), random.Random(3), [0], 0
    ids, probs = array("i", [5, 6, 7, 8] * 4), array("f", [0.25] * 16)
    told = Distribution(3, "float32", probs.tobytes(), ids.tobytes())

    def answers(ask):
        sent[0] += 1
        rows = [Drafted(row.request_id, row.start + len(row.tokens), [5, 6, 7, 8]) for row in ask.rows]
        others = [
            Drafts(ask.number, rows),
            Drafts(ask.number, rows, 3),
            DrawnDrafts(ask.number, [DrawnDraft(*each, told) for each in map(astuple, rows)]),
            Failed(ask.number, "SD-E210", "it raised", {"where": "x.py:3"}),
            Failed(ask.number, "SD-E110", "it raised", {"reason": "so"}, ("n", "m:C", "d", "1"), "Refusal"),
            Refused("SD-E332", "no", {"reason": "so", "self": "it"}),
            Unknown(),
            Returned(ask.number, {"x": 1.0}),
            Welcome(1, "again", 4),
        ]
        return [changed(encode(chance.choice(others)), chance)]

    address = f"ipc://{tmp_path}/socket"
    with stub(address, answers):
        config = remote(address, hang_seconds=0.02)
        config |= {"on_proposer_error": "skip_step", "draft_sample_method": method}
        llm = engine(config)
        for num_rounds in count(1):
            assert texts(llm, PROMPTS, GREEDY) == plain
            assert sent[0] >= num_rounds, "it is asked no more"
            if sent[0] >= many:
                break
            if chance.random() < 0.02:  # waits a second for an answer that seldom comes
                llm.get_metrics()
            if not settled and sent[0] >= settled_at:
                settled = mebibytes_of(os.getpid())
        assert mebibytes_of(os.getpid()) - settled < MOST_GROWTH
        llm.close()
