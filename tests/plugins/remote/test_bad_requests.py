"""A request with something that a drafter cannot take: it alone gets no drafts, and the server serves on."""

from __future__ import annotations

import pytest
from drafter_servers import Client, hosted_with, serving
from test_server import NGRAM, REPEATING, drafts_of

from specdec.sdk import ProposerBase, StrictModel
from specdec.sdk.errors import ProposerError
from specdec.sdk.types import Draft
from specdec.sdk.wire import (
    DRAFTED,
    End,
    Failed,
    Refused,
    Row,
    Start,
    Welcome,
    as_failed,
    as_refused,
    at_client,
    encode,
)


class Told(StrictModel):
    """What a request may say."""

    token: int = 0
    label: str = ""


class ReadsOptions(ProposerBase):
    """Drafts the token that each request names. Fails with the request's own text where that is not empty."""

    RequestOptions = Told

    def propose(self, step):
        for request in step.requests:
            if request.options.label:
                raise ValueError(request.options.label)
        return Draft.from_lists([[each.options.token] for each in step.requests], step.width)


def reading():
    return hosted_with({"method": f"{__name__}:ReadsOptions", "num_speculative_tokens": 2})


def test_the_proposer_is_told_what_a_request_says(tmp_path) -> None:
    with serving(reading(), f"ipc://{tmp_path}/socket") as server, Client(server.address) as client:
        client.hello()
        client.say(Start("a", [1, 2], "", '{"token": 7}')), client.say(Start("b", [1, 2]))
        assert drafts_of(client, 1, Row("a", 2, [3], 2), Row("b", 2, [3], 2)) == [(DRAFTED, 3, [7]), (DRAFTED, 3, [0])]


@pytest.mark.parametrize("options", ['{"tokn": 7}', '{"token": "x"}', '{"\\ud800": 1}', '{"token": "\\ud800"}'])
def test_options_that_it_does_not_take_are_said_of_their_request_alone(tmp_path, options) -> None:
    with serving(reading(), f"ipc://{tmp_path}/socket") as server, Client(server.address) as client:
        client.hello()
        client.say(Start("good", [1, 2], "", '{"token": 7}'))
        client.say(Start("bad", [1, 2], "", options))
        failed = client.hear()
        assert isinstance(failed, Failed)
        assert (failed.code, failed.number, failed.request_id) == ("SD-E270", 0, "bad")
        assert drafts_of(client, 1, Row("good", 2, [3], 2)) == [(DRAFTED, 3, [7])]


def test_half_a_surrogate_pair_in_an_error_ends_no_server(tmp_path) -> None:
    with serving(reading(), f"ipc://{tmp_path}/socket") as server, Client(server.address) as client:
        client.hello()
        client.say(Start("a", [1, 2], "", '{"label": "half \\ud800"}'))
        client.say(Start("b", [1, 2], "", '{"token": 7}'))
        assert isinstance(client.hello(), Welcome)
        client.say(Start("a", [1, 2], "", '{"label": "half \\ud800"}'))
        with pytest.raises(AssertionError, match=r"half \?"):
            drafts_of(client, 1, Row("a", 2, [3], 2))
        assert isinstance(client.hello(), Welcome)


def test_errors_are_cut_to_what_a_message_holds() -> None:
    facts = {"k" * 600: "v" * 30_000, "": "x", "half \ud800": "half \ud800"}
    error = ProposerError("SD-E210", "s \udfff" + "s" * 30_000, facts)
    failed, refused = at_client(encode(as_failed(error))), at_client(encode(as_refused(error)))
    assert isinstance(failed, Failed)
    assert isinstance(refused, Refused)
    assert failed.summary == refused.summary == "s ?" + "s" * 19_997
    assert failed.facts == refused.facts == {"k" * 512: "v" * 20_000, "?": "x", "half ?": "half ?"}


def test_last_tokens_that_cannot_be_leave_no_row_taken(tmp_path) -> None:
    """As many clients as there are rows do it, one after the other."""
    hosted = hosted_with(NGRAM, max_num_seqs=2)
    with serving(hosted, f"ipc://{tmp_path}/socket") as server:
        for _ in range(3):
            with Client(server.address) as bad:
                bad.hello()
                bad.say(Start("a", REPEATING)), bad.say(End("a", "stop", 7, [4096]))
                refused = bad.hear()
                assert isinstance(refused, Refused)
                assert refused.code == "SD-E331"
        with Client(server.address) as good:
            good.hello()
            good.say(Start("a", REPEATING))
            assert drafts_of(good, 1, Row("a", 7, [3], 1)) == [(DRAFTED, 8, [4])]
    assert len(hosted.names("")) == 1
