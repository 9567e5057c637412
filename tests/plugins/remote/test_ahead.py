"""Drafts prepared while the target verifies: the same drafts, sooner; and not where it does not pay."""

from __future__ import annotations

import random
import time

import pytest
from drafter_servers import hosted_with
from inside import proposer_of

from specdec import LLM, SamplingParams
from specdec.adapters.serving.outcomes import FIRST_HOLD, TRIAL, NumOutcomes, Trial
from specdec.plugins.draft_model.proposer import DraftModelProposer
from specdec.sdk import ConfigError, Draft, HostProposer, Needs, ProposerBase, ProposerError, Refusal
from specdec.sdk.combinators import Chain
from specdec.sdk.extensions import Ahead
from specdec.sdk.model_proposer.fan_out import NUM_GUESSES, FanOut, Guess
from specdec.sdk.wire import End, Row, Start

DRAFT_MODEL = {"model": "tiny/draft", "num_speculative_tokens": 4}
PROMPTS = ["def read_lines(path):\n", "class Stack:\n    def push(self, x):\n", "import os\nimport sys\n"]


class Prepares(ProposerBase):
    """Drafts how often it was asked to prepare, and fails where the newest token is 13."""

    needs = Needs(extensions=(Ahead(),))

    def __init__(self, config):
        super().__init__(config)
        self.calls, self.fails = 0, False

    def propose(self, step):
        self.fails = 13 in step.newest_token.tolist()
        return Draft.from_lists([[self.calls]] * len(step), step.width)

    def draft_ahead(self, num_outcomes):
        if self.fails:
            raise ValueError("thirteen")
        self.calls += num_outcomes
        return self.calls % 3 > 0


class Two(Chain):
    """Its part prepares."""

    parts = (Prepares,)


class Nines(HostProposer):
    """Drafts for texts that begin with a 9."""

    def draft(self, request, tokens, k):
        return [9] * k if tokens[0] == 9 else []


class NinesThenModel(Chain):
    """Its second part is asked where the first drafts nothing."""

    parts = (Nines, DraftModelProposer)


class Client:
    """An engine that accepts and goes on as a die says, and knows what the other tokens of its texts are."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.texts = {}
        self.answered = {}

    def start(self, name, *served):
        self.texts[name] = [self.dice.randrange(4000) for _ in range(self.dice.randint(2, 40))]
        self.answered[name] = []
        for hosted in served:
            hosted.start(name, Start(name, list(self.texts[name])))
        self.texts[name].append(self.dice.randrange(4000))
        self.new = {}

    def rows(self, names, guess):
        """What happened to the last drafts. guess: the token behind so many of them."""
        rows = []
        for name in names:
            draft, text = self.answered[name], self.texts[name]
            if draft is None:
                rows.append((name, Row(name, len(text) - 1, text[-1:], 4)))
                continue
            num_accepted = self.dice.randint(0, len(draft))
            tokens = [*draft[:num_accepted], guess(name, num_accepted)]
            rows.append(
                (name, Row(name, len(text), tokens, self.dice.choice([4, 4, 4, 2, 0]), len(draft), num_accepted))
            )
            text += tokens
        return rows


def guess_of(hosted, dice):
    """A token that was guessed where one was, or any."""

    def guess(name, num_accepted):
        request = hosted._texts[name].request
        text = hosted.host.proposer._ahead._texts[request.row]
        guesses = text.guesses(num_accepted) if text.likely else []
        return dice.choice(guesses[:2]) if guesses and dice.random() < 0.8 else dice.randrange(4000)

    return guess


@pytest.mark.full
@pytest.mark.parametrize("config", [DRAFT_MODEL, DRAFT_MODEL | {"num_speculative_tokens": 1}])
def test_prepared_drafts_are_those_that_it_makes_when_it_is_asked(config) -> None:
    ahead, plain = hosted_with(config, ahead=6), hosted_with(config)
    client = Client(seed=7)
    waiting, running = [f"r{number}" for number in range(9)], []
    for _ in range(160):
        while waiting and len(running) < 4:
            name = waiting.pop()
            client.start(name, ahead, plain)
            client.answered[name] = None
            running.append(name)
        names = [name for name in running if client.dice.random() < 0.9]
        rows = client.rows(names, guess_of(ahead, client.dice))
        answers = [hosted.step(rows) for hosted in (ahead, plain)]
        assert answers[0] == answers[1]
        client.answered |= {row.request_id: row.tokens for row in answers[0]}
        for _ in range(client.dice.choice([0, 1, 3, 9])):
            if ahead.has_more_to_do:
                ahead.draft_ahead()
        if running and client.dice.random() < 0.05:
            name = running.pop(0)
            for hosted in (ahead, plain):
                hosted.end(name, End(name, "stop", len(client.texts[name]), []))
        assert not plain.has_more_to_do
    figures = ahead.figures()
    assert all(figures[name] > 5 for name in ("ahead_whole", "ahead_missed"))
    assert config["num_speculative_tokens"] == 1 or figures["ahead_part"] > 5
    assert plain.figures() == {}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_passes_between_steps_are_compiled_at_the_start() -> None:
    hosted, client = hosted_with(DRAFT_MODEL, ahead=4, torch_compile=True), Client(seed=3)
    run = hosted.host.proposer._ahead._run
    num_compiled = run.num_compiled
    assert run.is_compiled
    for name in ("a", "b", "c"):
        client.start(name, hosted)
        client.answered[name] = None
    for _ in range(40):
        names = [name for name in client.texts if client.dice.random() < 0.6]
        answers = hosted.step(client.rows(names, guess_of(hosted, client.dice)))
        client.answered |= {row.request_id: row.tokens for row in answers}
        while hosted.has_more_to_do:
            hosted.draft_ahead()
    assert run.num_compiled == num_compiled
    assert hosted.figures()["ahead_whole"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_text_is_equal_and_drafts_are_ready(temperature) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=3)
    plain, isolation = LLM("tiny"), {"kind": "process", "num_threads": 1, "ahead": 8}
    with LLM("tiny", speculative_config=DRAFT_MODEL | {"isolation": isolation}) as llm:
        texts = [[each.outputs[0].token_ids for each in one.generate(PROMPTS, params)] for one in (plain, llm)]
        assert texts[0] == texts[1]
        figures = proposer_of(llm).metrics()
        end = time.monotonic() + 60
        while not figures["ahead_whole"] and time.monotonic() < end:  # a busy machine left no time between steps
            llm.engine.add_request(PROMPTS[0], params)
            while llm.engine.has_unfinished_requests:
                llm.engine.step()
                time.sleep(0.2)
            figures = proposer_of(llm).metrics()
        assert figures["ahead_whole"] > 0
        assert figures["process_errors"] == 0


@pytest.mark.full
def test_without_it_nothing_is_prepared() -> None:
    isolation = {"kind": "process", "ahead": 0}
    with LLM("tiny", speculative_config=DRAFT_MODEL | {"isolation": isolation}) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8))
        assert not [name for name in proposer_of(llm).metrics() if name.startswith("ahead")]
    with pytest.raises(ConfigError, match="SD-E132"):
        LLM("tiny", speculative_config=DRAFT_MODEL | {"isolation": {"kind": "process", "ahead": 17}})


def test_an_engine_does_not_offer_it() -> None:
    with pytest.raises(Refusal, match="ahead@1"):
        LLM("tiny", speculative_config={"method": f"{__name__}:Prepares", "num_speculative_tokens": 1})


@pytest.mark.parametrize("name", ["Prepares", "Two"])
def test_any_class_may_prepare_until_it_has_nothing_more_to_do(name) -> None:
    hosted = hosted_with({"method": f"{__name__}:{name}", "num_speculative_tokens": 1}, ahead=2)
    hosted.start("a", Start("a", [1, 2]))
    (drafted,) = hosted.step([("a", Row("a", 2, [3], 1))])
    calls = 0
    while hosted.has_more_to_do:
        hosted.draft_ahead()
        calls += 1
    assert (drafted.tokens, calls) == ([0], 3)
    assert hosted.step([("a", Row("a", 3, [4], 1))])[0].tokens == [6]
    hosted.end("a")
    assert not hosted.has_more_to_do


def test_a_draft_model_that_was_not_asked_prepares_nothing() -> None:
    hosted = hosted_with(DRAFT_MODEL | {"method": f"{__name__}:NinesThenModel"}, ahead=4)
    hosted.start("a", Start("a", list(range(100, 300))))
    hosted.step([("a", Row("a", 200, [5], 4))])
    hosted.end("a", End("a", "stop", 201, []))
    hosted.start("b", Start("b", [9, 1]))
    hosted.step([("b", Row("b", 2, [7], 4))])
    while hosted.has_more_to_do:
        hosted.draft_ahead()
    (drafted,) = hosted.step([("b", Row("b", 3, [9, 9, 9, 9, 3], 4, 4, 4))])
    assert drafted.tokens == [9] * 4
    assert hosted.figures()["draft_model_ahead_whole"] == 0


def test_what_it_raises_is_raised_in_the_next_step() -> None:
    hosted = hosted_with({"method": f"{__name__}:Prepares", "num_speculative_tokens": 1}, ahead=2)
    hosted.start("a", Start("a", [1, 2]))
    hosted.step([("a", Row("a", 2, [13], 1))])
    hosted.draft_ahead()
    assert not hosted.has_more_to_do
    with pytest.raises(ProposerError, match="thirteen"):
        hosted.step([("a", Row("a", 3, [4], 1))])
    hosted.start("a", Start("a", [1, 2, 13, 4]))
    assert hosted.step([("a", Row("a", 4, [5], 1))])[0].tokens == [0]


def rounds(trial, ahead, without, count):
    """The outcomes of so many rounds, which take these times."""
    found, seconds = [], None
    for _ in range(count):
        found.append(trial.next(seconds))
        seconds = ahead if found[-1] else without
    return found


def test_it_goes_on_where_it_pays_and_stops_where_it_does_not() -> None:
    assert set(rounds(Trial(8), 1.0, 1.3, TRIAL + 40)[TRIAL:]) == {8}
    assert set(rounds(Trial(8), 1.0, 1.0, TRIAL + 40)[TRIAL:]) == {0}
    assert set(rounds(Trial(8), 1.3, 1.0, TRIAL + FIRST_HOLD)[TRIAL:]) == {0}


def test_it_is_tried_again_after_pauses_that_grow() -> None:
    trial = Trial(8)
    found = rounds(trial, 1.3, 1.0, 2 * TRIAL + FIRST_HOLD)
    assert found.count(8) == TRIAL
    assert found[TRIAL + FIRST_HOLD] == 8
    later = rounds(trial, 1.0, 1.3, 2 * FIRST_HOLD)
    assert later.count(8) < FIRST_HOLD / 4


def test_outcomes_are_those_asked_for_or_shared_by_the_requests_of_a_step() -> None:
    now = iter(range(1000))
    assert [NumOutcomes(n, lambda: 0.0).next(["a"]) for n in (0, 3, 99)] == [0, 3, 16]
    chosen = NumOutcomes("auto", lambda: float(next(now)))
    assert [chosen.next([str(n) for n in range(count)]) for count in (0, 1, 2, 5, 40)] == [0, 8, 8, 3, 1]


def test_outcomes_fall_with_each_draft_and_rise_behind_the_last() -> None:
    best = FanOut().best(4, 12)
    counts = [sum(guess.num_accepted == n for guess in best) for n in range(5)]
    assert counts[:4] == sorted(counts[:4], reverse=True)
    assert counts[4] > counts[3]
    assert best == sorted(best, key=best.index)
    assert [guess.rank for guess in best if guess.num_accepted == 4] == list(range(counts[4]))


def test_what_was_counted_takes_the_place_of_what_is_assumed() -> None:
    fan_out = FanOut()
    for _ in range(600):
        fan_out.record(1, 4, 2)
    assert fan_out.best(4, 1) == [Guess(1, 2)]
    for _ in range(600):
        fan_out.record(4, 4, 0)
    assert fan_out.best(4, 1) == [Guess(4, 0)]
    assert len(FanOut().best(1, 99)) == 2 * NUM_GUESSES - 1
