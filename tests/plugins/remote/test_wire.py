"""Messages: what is written is read, and bytes of anybody are read as data or refused."""

from __future__ import annotations

import random

import pytest

from specdec.sdk.wire import (
    UNREADABLE,
    Ask,
    AskDrawn,
    Bye,
    Distribution,
    Drafted,
    Drafts,
    Drawing,
    DrawnDraft,
    DrawnDrafts,
    End,
    Failed,
    Form,
    Hello,
    Refused,
    Row,
    Start,
    Unknown,
    Welcome,
    at_client,
    at_server,
    encode,
)

TO_SERVER = [
    Hello(1, 4096, 512, 4, "an engine"),
    Start("a", [1, 2, 3], "team", '{"depth": 2}'),
    Hello(1, 4096, 512, 4, "an engine", Form("sparse", 256)),
    Ask(7, [Row("a", 3, [4, 5], 4, 3, 1), Row("b", 0, [], 0)]),
    AskDrawn(7, [Row("a", 3, [4, 5], 4, 3, 1)], [Drawing([0.25, 0.5], 0.7, 40, 0.9, 0.1)]),
    End("a", "stop", 5, [6]),
    Bye(),
]
TO_CLIENT = [
    Welcome(1, "specdec-sdk:some", 4),
    Refused("SD-E332", "no", {"why": "so"}),
    Unknown(),
    Drafts(7, [Drafted("a", 5, [6, 7])], 120),
    DrawnDrafts(
        7, [DrawnDraft("a", 5, [6], 0, Distribution(3, "float32", bytes(8), bytes(8))), DrawnDraft("b", 1, [])]
    ),
    Failed(7, "SD-E210", "it raised", {"where": "x.py:3"}, ("n", "m:C", "", "")),
]


@pytest.mark.parametrize("message", TO_SERVER, ids=lambda each: type(each).__name__)
def test_a_server_reads_what_a_client_wrote(message) -> None:
    assert at_server(encode(message)) == message


@pytest.mark.parametrize("message", TO_CLIENT, ids=lambda each: type(each).__name__)
def test_a_client_reads_what_a_server_wrote(message) -> None:
    assert at_client(encode(message)) == message


@pytest.mark.parametrize("message", TO_CLIENT, ids=lambda each: type(each).__name__)
def test_a_message_for_the_other_side_is_refused(message) -> None:
    with pytest.raises(UNREADABLE):
        at_server(encode(message))


def test_fields_of_a_later_version_are_left_aside() -> None:
    assert at_server(b"\x92\x08\xa3new") == Bye()  # [8, "new"]


@pytest.mark.parametrize(
    "data",
    [
        encode(Ask(1, [Row("a", 0, [-1], 4)])),
        encode(Ask(1, [Row("a", 0, [2**31], 4)])),
        encode(Ask(-1, [])),
        encode(Start("", [1])),
        encode(Start("a" * 513, [1])),
        encode([6, 1, "rows"]),
        b"\x91" * 100_000,
        b"",
    ],
)
def test_values_out_of_range_are_no_message(data) -> None:
    with pytest.raises(UNREADABLE):
        at_server(data)


def test_ten_thousand_changed_messages_are_read_or_refused() -> None:
    chance = random.Random(0)
    refused = 0
    for number in range(10_000):
        read, messages = ((at_server, TO_SERVER), (at_client, TO_CLIENT))[number % 2]
        data = bytearray(encode(chance.choice(messages)))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            read(bytes(data[: chance.randint(0, len(data))]) if number % 5 == 0 else bytes(data))
        except UNREADABLE:
            refused += 1
    assert refused > 1000
