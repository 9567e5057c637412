"""Drawn drafts from a server: those of one process, told in every form; and what is refused of forms and answers."""

from __future__ import annotations

import pytest
import torch
from drafter_servers import Client, hosted_with, served, serving
from test_isolation import DRAWN, GREEDY, MODULE, PROBABILISTIC, sampled
from test_remote import engine, figures, remote, stub, texts, wrong

from specdec.plugins.remote.drawn import DrawnFrom, distribution_of, most_answer_bytes
from specdec.sdk import ConfigError, DistributionKind, Draft, Needs, ProposerBase, Refusal
from specdec.sdk.wire import (
    MAX_MESSAGE_BYTES,
    UNREADABLE,
    Ask,
    AskDrawn,
    Distribution,
    Drafted,
    Drafts,
    Drawing,
    DrawnDraft,
    DrawnDrafts,
    Form,
    Refused,
    Row,
    Start,
    at_server,
    encode,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SPARSE = Form("sparse", 4)


def draws(kind, **options):
    config = {"method": f"{MODULE}:Draws", "num_speculative_tokens": 4} | PROBABILISTIC
    return config | {"proposer_config": {"kind": kind, **options}}


def drawn_at(address, **options):
    return remote(address, **options) | PROBABILISTIC


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/socket"


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (draws("SPARSE"), {}),
        (draws("SPARSE", dtype="float64"), {"sparse_top_m": 128}),
        (draws("DENSE_PROBS", dtype="bfloat16"), {"draft_distribution": "dense"}),
        (draws("DENSE_LOGITS"), {"draft_distribution": "dense"}),
        pytest.param(DRAWN, {}, marks=pytest.mark.slow),
    ],
    ids=["sparse", "float64", "bfloat16", "logits", "draft_model"],
)
def test_drafts_and_what_becomes_of_them_are_those_of_one_process(config, options, address) -> None:
    """Bit for bit: with its seeds, what is accepted is the same at every place."""
    with serving(hosted_with(config), address):
        llm = engine(drawn_at(address, **options))
        found = sampled(llm)
        assert figures(llm)["in_time"] == figures(llm)["asked"] > 0
        llm.close()
    assert found == sampled(engine(config))
    assert min(each["num_accepted_draft_tokens"] for _, each in found[:2]) > 0


def test_greedy_engines_share_a_server_that_draws_for_others(address) -> None:
    with serving(hosted_with(draws("SPARSE")), address):
        llm = engine(remote(address))
        assert texts(llm) == texts(engine())
        llm.close()


@pytest.mark.full
def test_the_command_serves_drawn_drafts(tmp_path) -> None:
    with served("tiny/draft", f"ipc://{tmp_path}/socket", **PROBABILISTIC) as (_, address):
        llm = engine(drawn_at(address))
        assert sampled(llm) == sampled(engine(DRAWN))
        llm.close()


def test_a_server_of_a_version_that_draws_nothing_is_asked_for_one_hot_drafts(address) -> None:
    asked = []
    with stub(address, lambda ask: asked.append(type(ask)) or [wrong(ask)]):
        llm = engine(drawn_at(address))
        assert [len(text) for text, _ in sampled(llm)] == [48, 40, 48]
        assert set(asked) == {Ask}
        llm.close()


# What is refused at the start


@pytest.mark.parametrize(
    ("config", "options", "found"),
    [
        (NGRAM, {}, "none here, sparse of 256 entries there"),
        (draws("DENSE_PROBS"), {}, "dense of 4096 entries here, sparse of 256 entries there"),
        (draws("SPARSE"), {"sparse_top_m": 64}, "sparse of 128 entries here, sparse of 64 entries there"),
        (
            draws("DENSE_PROBS", own_vocabulary=True),
            {"draft_distribution": "dense"},
            "dense of 2048 entries of a draft vocabulary here, dense of 4096 entries there",
        ),
    ],
    ids=["greedy", "other_form", "fewer_entries", "own_vocabulary"],
)
def test_a_server_whose_drafts_cannot_be_told_is_refused(config, options, found, address) -> None:
    with serving(hosted_with(config), address), pytest.raises(ConfigError, match=f"SD-E332[\\s\\S]*{found}"):
        engine(drawn_at(address, **options))


def test_a_deadline_is_refused() -> None:
    with pytest.raises(Refusal, match=r"deadline_ms is 5[\s\S]*no deadline_ms"):
        engine(drawn_at("ipc:///nowhere", deadline_ms=5))


# What a server is sent


class Records(ProposerBase):
    """Keeps what it is shown to draw with."""

    needs = Needs(sampling=("temperature", "top_k", "min_p"), distributions=("dense",))

    def propose(self, step):
        self.shown = vars(step.sampling)
        self.uniforms = [step.random.uniform(index).tolist() for index in range(2)]
        return Draft.from_lists([[]] * len(step), step.width)


@pytest.mark.parametrize("temperatures", [(0.5, 1), (0.5, 0), (0, 0)])
def test_a_proposer_is_shown_what_its_engine_sent(temperatures) -> None:
    config = {"method": f"{__name__}:Records", "num_speculative_tokens": 2} | PROBABILISTIC
    hosted = hosted_with(config)
    for name in "ab":
        hosted.start(name, Start(name, [1, 2]))
    drawings = [Drawing([0.1, 0.2], temperatures[0], 5, 0.75, 0.25), Drawing([0.3, 0.4], temperatures[1])]
    hosted.step([(name, Row(name, 2, [3], 2)) for name in "ab"], drawings)
    found = hosted.host.proposer
    assert found.uniforms == [[0.1, 0.3], [0.2, 0.4]]
    assert found.shown["temperature"].tolist() == [*temperatures]
    assert (found.shown["top_k"].tolist(), found.shown["min_p"].tolist()) == ([5, 0], [0.25, 0])
    assert found.shown["top_p"] is None
    assert found.shown["all_greedy"] == (temperatures == (0, 0))
    assert {each.dtype for each in found.shown.values() if isinstance(each, torch.Tensor)} == {
        torch.float32,
        torch.int64,
    }


@pytest.mark.parametrize(
    "drawings",
    [[], [Drawing([0.5] * 4)] * 2, [Drawing([0.5] * 3)], [Drawing([])]],
    ids=["none", "two", "short", "empty"],
)
def test_a_client_that_sends_other_numbers_than_are_drawn_with_is_refused(drawings) -> None:
    with serving(hosted_with(draws("SPARSE")), "tcp://127.0.0.1:*") as server, Client(server.address) as client:
        assert client.hello(form=Form("sparse", 128)).num_uniforms == 4
        client.say(Start("a", [1, 2, 3]))
        client.say(AskDrawn(1, [Row("a", 3, [4], 4)], drawings))
        assert isinstance(client.hear(), Refused)


@pytest.mark.parametrize(
    "drawing",
    [Drawing([0.0]), Drawing([1.0]), Drawing([float("nan")]), Drawing([0.5], float("nan")), Drawing([0.5], 1, -1)],
)
def test_numbers_that_are_none_are_no_message(drawing) -> None:
    with pytest.raises(UNREADABLE):
        at_server(encode(AskDrawn(1, [], [drawing])))


def test_a_request_that_begins_again_is_not_known_and_its_drafts_are_drawn_behind_its_text() -> None:
    with serving(hosted_with(draws("SPARSE")), "tcp://127.0.0.1:*") as server, Client(server.address) as client:
        client.hello(form=Form("sparse", 128))
        client.say(Start("a", [1, 2, 3]))
        client.say(AskDrawn(1, [Row("b", 3, [4], 4), Row("a", 3, [4], 2)], [Drawing([0.5] * 4)] * 2))
        unknown, drawn = client.hear().rows
        assert (unknown.state, unknown.distribution) == (1, None)
        assert len(drawn.tokens) == 2
        assert DrawnFrom.read(drawn.distribution, 2, Form("sparse", 128)).tables["sparse_ids"].shape == (2, 5)


# What a server answers


def told(num_drafts=2, num_entries=3, kind=3, dtype="float32", ids=None) -> Distribution:
    ids = torch.arange(num_entries, dtype=torch.int32).repeat(num_drafts) if ids is None else ids
    values = torch.full((num_drafts * num_entries,), 1 / max(num_entries, 1), dtype=getattr(torch, dtype))
    return Distribution(kind, dtype, values.view(torch.uint8).numpy().tobytes(), ids.numpy().tobytes())


@pytest.mark.parametrize(
    ("distribution", "num_drafts", "form"),
    [
        (told(), 2, None),
        (told(), 2, Form("dense", 3)),
        (told(kind=1), 2, SPARSE),
        (told(), 5, SPARSE),
        (told(), 0, SPARSE),
        (told(num_entries=5), 2, SPARSE),
        (told(ids=torch.zeros(2, dtype=torch.int32)), 2, SPARSE),
        (told(num_entries=0), 2, SPARSE),
        (told(kind=2), 2, Form("dense", 4)),
    ],
)
def test_a_distribution_of_another_form_is_none(distribution, num_drafts, form) -> None:
    with pytest.raises(ValueError, match=r"distribution|probabilities"):
        DrawnFrom.read(distribution, num_drafts, form)


def test_rows_of_several_kinds_are_put_together() -> None:
    form = Form("dense", 3)
    rows = [DrawnFrom.read(told(1, 3, kind), 1, form) for kind in (1, 2)]
    found = distribution_of([rows[0], None, rows[1]], 2, form)
    assert found.kind.tolist() == [
        DistributionKind.DENSE_PROBS,
        DistributionKind.ONE_HOT,
        DistributionKind.DENSE_LOGITS,
    ]
    assert found.probs[0, 0].tolist() == found.logits[2, 0].tolist() == [pytest.approx(1 / 3)] * 3
    assert not found.probs[1:].any()
    assert distribution_of([None, None], 2, form) is None


def answers_with(distribution, tokens=(0, 1)):
    def answer(ask):
        rows = [DrawnDraft(row.request_id, row.start + len(row.tokens), [*tokens], 0, distribution) for row in ask.rows]
        return [encode(DrawnDrafts(ask.number, rows))]

    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        answers_with(told(num_drafts=3)),
        answers_with(told(kind=1)),
        answers_with(told(num_entries=300)),
        answers_with(told(num_drafts=4000), [0] * 4000),
        answers_with(told(ids=torch.full((6,), 2**31 - 1, dtype=torch.int32))),
        answers_with(told(ids=torch.full((6,), -5, dtype=torch.int32))),
        answers_with(told(), [7, 7]),
        answers_with(Distribution(3, "float32", b"\xff" * 24, told().ids)),
        lambda ask: [b"x" * most_answer_bytes(Form("sparse", 256), 64, 4) * 2],
    ],
    ids=["long", "kind", "wide", "many", "beyond", "below", "undrawn", "nan", "huge"],
)
def test_whatever_is_said_of_a_distribution_nothing_ends_but_drafts(answer, address) -> None:
    config = drawn_at(address, hang_seconds=0.5) | {"on_proposer_error": "skip_step"}
    with stub(address, answer, num_uniforms=4):
        llm = engine(config)
        assert [len(text) for text, _ in sampled(llm)] == [48, 40, 48]
        assert texts(llm, params=GREEDY) == texts(engine())
        llm.close()


# What it costs


def test_a_step_without_drawn_drafts_has_the_bytes_that_it_had_before_there_were_any() -> None:
    asked = encode(Ask(7, [Row("a", 3, [4, 5], 4, 3, 1)]))
    answered = encode(Drafts(7, [Drafted("a", 5, [6, 7])], 120))
    assert asked == b"\x93\x06\x07\x91\x96\xa1a\x03\x92\x04\x05\x04\x03\x01"
    assert answered == b"\x94\x09\x07\x91\x94\xa1a\x05\x92\x06\x07\x00x"


def test_the_size_of_an_answer_is_limited_by_what_distributions_take() -> None:
    assert most_answer_bytes(None, 64, 4) == MAX_MESSAGE_BYTES
    dense = Form.of(Needs(distributions=("dense",)), 150_000)
    row = DrawnDraft("a", 1, [1] * 4, 0, Distribution(2, "float64", bytes(4 * 150_000 * 8)))
    assert MAX_MESSAGE_BYTES < len(encode(DrawnDrafts(1, [row]))) < most_answer_bytes(dense, 1, 4)


def test_padding_behind_what_filters_left_is_not_sent() -> None:
    """A text of 5 different tokens at most."""
    hosted = hosted_with(draws("SPARSE"))
    hosted.start("a", Start("a", [1, 2, 3]))
    [row] = hosted.step([("a", Row("a", 3, [4], 4))], [Drawing([0.5] * 4)])
    assert len(row.distribution.values) == 4 * 5 * 4
    assert len(encode(row)) < 200
