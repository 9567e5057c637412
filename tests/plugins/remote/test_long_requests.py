"""Requests of an engine's own that no message holds as they are: at most they have to do without drafts."""

from __future__ import annotations

import json

import pytest
from drafter_servers import hosted_with, serving
from pydantic import Field, SecretStr, computed_field
from test_isolation import NGRAM, PROMPTS, engine, texts
from test_remote import figures, remote

from specdec import SamplingParams
from specdec.core.registry import PluginSettings
from specdec.plugins.remote import asking
from specdec.plugins.remote.as_json import as_json
from specdec.plugins.remote.asking import Rows
from specdec.plugins.remote.texts import Text, UnsendableError, name_of, start_of
from specdec.sdk import Draft, ProposerBase, Refusal, StrictModel
from specdec.sdk.types import RequestView
from specdec.sdk.wire import MAX_MESSAGE_BYTES, AskDrawn, Drawing, at_server, encode

GREEDY = SamplingParams(temperature=0, max_tokens=40)


class Said(StrictModel):
    """What a request may say."""

    token: int = 0
    context: str = ""
    scale: float = 1.0
    secret: SecretStr = SecretStr("")


def view(options=None, **facts) -> RequestView:
    told = {"request_id": "a", "slot": 0, "generation": 1, "prompt_token_ids": [1, 2], "options": options}
    return RequestView(**told | facts)


def ended(llm, **params) -> list[list[int]]:
    """The texts of requests that are added by hand, by their ids."""
    added = []
    for request_id, each in params.items():
        llm.engine.add_request(PROMPTS[0], each, request_id)
        added.append(llm.engine._requests[request_id])
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    return [list(each.token_ids[len(each.prompt_token_ids) :]) for each in added]


def test_ids_and_namespaces_of_any_length_cost_no_drafts(tmp_path) -> None:
    [plain] = texts(engine(), PROMPTS[:1], GREEDY)
    with serving(hosted_with(NGRAM), f"ipc://{tmp_path}/socket") as server:
        llm = engine(remote(server.address))
        names = {"r" * 600: GREEDY, "r" * 601: GREEDY, "\ud800": GREEDY, "b": GREEDY.replace(namespace="n" * 30_000)}
        assert ended(llm, **names) == [plain] * 4
        shown = figures(llm)
        assert shown["outages"] == 0
        assert llm.engine.metrics.acceptance.num_accepted_tokens > 4 * 5
        llm.close()


def test_short_ids_are_themselves_and_others_have_a_name_of_their_own() -> None:
    assert name_of("a") == "a"
    assert name_of("x" * 512) == "x" * 512
    found = {name_of(each) for each in ("x" * 513, "x" * 514, "\ud800", "\ud801")}
    assert len(found) == 4
    assert max(map(len, found)) < 100


def test_options_are_those_that_were_given() -> None:
    assert json.loads(start_of(view(Said(token=3, context="c")), "a").options) == {"token": 3, "context": "c"}
    assert start_of(view(Said()), "a").options == "{}"
    assert start_of(view(), "a").options == ""


class Renamed(StrictModel):
    """Has an option whose key is no name of Python's, and a figure that is computed."""

    most: int = Field(default=2, alias="most-drafts")

    @computed_field
    @property
    def twice(self) -> int:
        return 2 * self.most


def test_options_go_under_the_keys_that_they_were_given_by() -> None:
    assert as_json(Renamed(**{"most-drafts": 3})) == {"most-drafts": 3}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"options": Said(secret=SecretStr("hunter2"))}, "no JSON: secret would be read as something else"),
        ({"options": Said(scale=float("inf"))}, "no JSON"),
        ({"options": Said(context="\ud800")}, "no JSON"),
        ({"options": Said(context="x" * 20_000)}, "characters, and a message holds 20000"),
        ({"prompt_token_ids": [2**30] * 2**20}, "a message holds"),
        ({"prompt_token_ids": [1] * (2**20 + 1)}, "a message holds"),
    ],
)
def test_a_request_that_no_message_holds_is_known(facts, reason) -> None:
    with pytest.raises(UnsendableError, match=reason) as raised:
        start_of(view(**facts), "a")
    assert "hunter2" not in str(raised.value)


class ReadsOptions(ProposerBase):
    """Drafts the token that each request names."""

    RequestOptions = Said

    def propose(self, step):
        told = zip(step.requests, step.budget.tolist(), strict=True)
        return Draft.from_lists([[each.options.token] * budget for each, budget in told], step.width)


@pytest.mark.full
def test_a_request_with_such_options_gets_no_drafts_and_others_do(caplog) -> None:
    config = {"method": f"{__name__}:ReadsOptions", "num_speculative_tokens": 4}
    [plain] = texts(engine(), PROMPTS[:1], GREEDY)
    llm = engine(config | {"isolation": "process"}, plugin_settings=PluginSettings.from_environment({}))
    told = [{"token": plain[1]}, {"context": "x" * 30_000}]
    params = [GREEDY.replace(extra_args={"specdec": each}) for each in told]
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS[:1] * 2, params)]
    assert [list(each.token_ids) for each in outputs] == [plain] * 2
    assert outputs[0].spec_decode_metrics["num_accepted_draft_tokens"] > 0
    assert outputs[1].spec_decode_metrics["num_draft_tokens"] == 0
    assert "SD-W332 a request is not for its drafter" in caplog.text
    assert "SD-W331" not in caplog.text
    llm.close()


def test_texts_that_are_sent_again_come_in_messages_that_a_server_reads(tmp_path, monkeypatch) -> None:
    """Here a message holds a text of sixty tokens: longer ones come in parts."""
    monkeypatch.setattr(asking, "MAX_MESSAGE_BYTES", asking.ENVELOPE_BYTES + 500)
    plain = texts(engine())
    with serving(hosted_with(NGRAM), f"ipc://{tmp_path}/socket") as server:
        llm = engine(remote(server.address))
        assert texts(llm) == plain
        assert llm.engine.metrics.acceptance.num_accepted_tokens > 0
        assert figures(llm)["outages"] == 0
        llm.close()


@pytest.mark.parametrize(("num_uniforms", "count"), [(0, 10**6), (0, 300_000), (0, 7), (1024, 5)])
def test_the_largest_question_is_a_message(num_uniforms, count) -> None:
    rows, drawings = Rows(num_uniforms, whole=False), []
    for number in range(5000):
        text = Text(f"{number:0512}", sent=2**50)
        if room := rows.room_for(text, count):
            rows.add(text, text.row([2**31 - 1] * room, 2**50, 2**50, 2**50), number)
            drawings.append(Drawing([0.1] * num_uniforms, 0.7, 2**50, 0.9, 0.1))
    message = encode(AskDrawn(2**50, rows.rows, drawings))
    assert len(message) <= MAX_MESSAGE_BYTES
    assert at_server(message).rows == rows.rows


def test_a_text_whose_states_come_along_is_never_cut() -> None:
    rows = Rows(0, whole=True)
    assert rows.room_for(Text("a"), 10**6) == 0
    assert rows.room_for(Text("a"), 1000) == 1000


class HasSecret(ReadsOptions):
    """Has an option that is no JSON."""

    Options = Said


@pytest.mark.parametrize(("name", "value"), [("secret", "hunter2"), ("scale", float("inf")), ("context", "\ud800")])
def test_options_that_would_not_survive_the_way_to_a_process_are_refused(name, value) -> None:
    config = {"method": f"{__name__}:HasSecret", "num_speculative_tokens": 4, "proposer_config": {name: value}}
    with pytest.raises(Refusal, match="its options are no JSON"):
        engine(config | {"isolation": "process"})
