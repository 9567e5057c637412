"""Answers that come late: what is offered of them, and that nothing waits. The tests hold the service's gates."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections import defaultdict
from concurrent.futures import wait
from dataclasses import replace

import pytest

from specdec import LLM, SamplingParams
from specdec.sdk import LateProposer, ProposerConfig, ProposerError, late_proposer
from specdec.testing import check_proposer, step_view

K = 3


class Counting(LateProposer):
    """Says that the text counts up. Each question waits at a gate of its own, that of the newest token."""

    def __init__(self, config):
        super().__init__(config)
        self.gates = defaultdict(threading.Event)
        self.asked = {}  # tokens and k that the service saw, by the newest token
        self.replies = {}  # by the newest token, where it is no counting up

    def ask(self, request, tokens, k):
        newest = tokens[-1]
        self.asked[newest] = tokens, k
        self.gates[newest].wait()
        reply = self.replies.get(newest, [newest + i for i in range(1, k + 1)])
        if isinstance(reply, BaseException):
            raise reply
        return reply


def config(deadline_ms, **options):
    return ProposerConfig(num_draft_tokens=K, options=Counting.Options(deadline_ms=deadline_ms, **options))


@pytest.fixture
def service():
    """It never waits."""
    made = Counting(config(0))
    yield made
    for gate in list(made.gates.values()):
        gate.set()
    made.close()


@pytest.fixture
def awaited(service):
    """It waits for every answer."""
    service.config = config(None)
    return service


@pytest.fixture
def open_when_awaited(monkeypatch):
    """Open a question's gate once a step waits, and not before."""

    def set_up(made, token):
        def opening(answers, timeout=None):
            threading.Timer(0, made.gates[token].set).start()
            return wait(answers, timeout=timeout)

        monkeypatch.setattr(late_proposer, "wait", opening)

    return set_up


def in_flight(made):
    return [text.answer for text in made._texts.values() if text.answer is not None]


def answer(made, *newest):
    """Let the service answer the questions after these tokens, which are all that are in flight."""
    for token in newest:
        made.gates[token].set()
    wait(in_flight(made))


def drafted(made, *texts, open_gates=(), **changes):
    for token in open_gates:
        made.gates[token].set()
    draft = made.propose(step_view(texts, K, **changes))
    return [ids[:length] for ids, length in zip(draft.token_ids.tolist(), draft.lengths.tolist(), strict=True)]


def figures(made):
    return {name: int(value) for name, value in made.metrics().items() if value}


def threads_of(made):
    return [each for each in threading.enumerate() if each.name == f"{type(made).__name__}.ask"]


def test_an_answer_within_the_step_is_its_draft(awaited):
    assert drafted(awaited, [5, 6], [8], open_gates=[6, 8]) == [[7, 8, 9], [9, 10, 11]]
    assert awaited.asked == {6: ([5, 6], K), 8: ([8], K)}
    assert figures(awaited) == {"asked": 2, "in_time": 2}


def test_a_step_without_a_deadline_does_not_wait(service):
    assert drafted(service, [5, 6]) == [[]]
    assert figures(service) == {"asked": 1, "waiting": 1}


def test_a_late_answer_is_rebased_on_what_was_committed_since(service):
    service.replies[6] = [7, 8, 9, 10, 11]
    drafted(service, [5, 6])
    answer(service, 6)
    assert drafted(service, [5, 6, 7, 8]) == [[9, 10, 11]]
    assert figures(service) == {"asked": 2, "late": 1, "rebased": 1, "waiting": 1}  # it asks for the next step


def test_an_answer_that_the_text_contradicts_is_dropped(service):
    drafted(service, [5, 6])
    answer(service, 6)
    assert drafted(service, [5, 6, 7, 1]) == [[]]
    assert figures(service) == {"asked": 2, "late": 1, "dropped": 1, "waiting": 1}


def test_an_answer_that_was_overtaken_is_dropped_and_the_next_question_asks_for_more(service):
    drafted(service, [5, 6])
    answer(service, 6)
    assert drafted(service, [5, 6, 7, 8, 9]) == [[]]
    assert figures(service)["dropped"] == 1
    answer(service, 9)
    assert service.asked[9] == ([5, 6, 7, 8, 9], K + 3)


def test_what_is_left_of_an_answer_serves_later_steps(service):
    service.replies[6] = [7, 8, 9, 10, 11, 12]
    drafted(service, [5, 6])
    answer(service, 6)
    assert drafted(service, [5, 6]) == [[7, 8, 9]]
    assert drafted(service, [5, 6, 7, 8, 9, 10]) == [[11, 12]]
    assert drafted(service, [5, 6, 7, 8, 9, 10, 3]) == [[]]


def test_a_newer_answer_takes_the_place_of_an_older_one_unless_it_says_nothing(service):
    service.replies |= {6: [7, 1, 1, 1], 7: [2, 3], 2: []}
    for token, text in [(6, [5, 6]), (7, [5, 6, 7]), (2, [5, 6, 7, 2])]:
        drafted(service, text)
        answer(service, token)
    assert drafted(service, [5, 6, 7, 2]) == [[3]]


def test_where_every_answer_is_awaited_a_newer_one_that_says_nothing_leaves_nothing_of_an_older_one(awaited):
    awaited.replies |= {6: [7, 8, 9], 7: []}
    assert drafted(awaited, [5, 6], open_gates=[6]) == [[7, 8, 9]]
    after_an_older_answer = drafted(awaited, [5, 6, 7], open_gates=[7])
    assert after_an_older_answer == drafted(awaited, [5, 6, 7], request_ids=["new"]) == [[]]


def test_one_question_of_a_request_is_in_flight(service):
    for length in range(2, 6):
        drafted(service, list(range(length)))
    assert figures(service) == {"asked": 1, "waiting": 1}


def test_the_same_text_is_not_asked_about_twice(awaited):
    awaited.replies[6] = []
    for _ in range(3):
        assert drafted(awaited, [5, 6], open_gates=[6]) == [[]]
    assert figures(awaited) == {"asked": 1, "in_time": 1}


def test_a_deadline_ends_the_wait(service):
    service.config = config(1)
    assert drafted(service, [5, 6]) == [[]]
    assert figures(service) == {"asked": 1, "waiting": 1}


@pytest.mark.parametrize("deadline_ms", [60_000.0, math.inf])
def test_with_a_deadline_a_step_waits_only_for_requests_that_have_nothing_to_offer(
    service, open_when_awaited, deadline_ms
):
    service.config = config(deadline_ms)
    service.replies[6] = [7, 8, 9, 10]
    open_when_awaited(service, 6)
    assert drafted(service, [5, 6]) == [[7, 8, 9]]
    assert drafted(service, [5, 6, 7]) == [[8, 9, 10]]  # gate 7 is closed
    assert figures(service)["waiting"] == 1


def test_without_a_deadline_a_step_waits_for_every_answer_and_no_draft_depends_on_the_time(awaited, open_when_awaited):
    awaited.replies |= {6: [7, 8, 9, 10], 7: [8, 1, 2]}
    drafted(awaited, [5, 6], open_gates=[6])
    open_when_awaited(awaited, 7)
    assert drafted(awaited, [5, 6, 7]) == [[8, 1, 2]]
    assert figures(awaited) == {"asked": 2, "in_time": 2}


def test_requests_without_a_budget_and_dummy_steps_ask_nothing(awaited):
    assert drafted(awaited, [5, 6], [8], open_gates=[8], budget=[0, 2]) == [[], [9, 10]]
    assert awaited.propose(replace(step_view([[7]], K), dummy=True)).lengths.tolist() == [0]
    assert figures(awaited) == {"asked": 1, "in_time": 1}


def test_questions_see_copies_of_the_text(service):
    drafted(service, [5, 6])
    drafted(service, [5, 6, 7])
    answer(service, 6)
    [(tokens, _)] = service.asked.values()
    assert tokens == [5, 6]
    tokens.append(1)
    assert drafted(service, [5, 6, 7]) == [[8, 9]]


def test_a_preempted_requests_answer_still_continues_its_text(service):
    drafted(service, [5, 6], generation=[1])
    answer(service, 6)
    assert drafted(service, [5, 6], budget=[0], generation=[2], slots=[1]) == [[]]  # replayed
    assert drafted(service, [5, 6, 7], generation=[2], slots=[1]) == [[8, 9]]


def test_the_answer_to_a_request_that_ended_is_dropped(service):
    step = step_view([[5, 6]], K)
    service.propose(step)
    service.on_finish(step.requests[0])
    assert figures(service) == {"asked": 1, "dropped": 1}
    assert drafted(service, [9]) == [[]]  # another request of the same name
    answer(service, 9)
    assert drafted(service, [9]) == [[10, 11, 12]]


def test_an_error_is_raised_once_for_each_type_and_counted(awaited):
    awaited.replies |= {6: ConnectionError("no route"), 7: ConnectionError("again"), 8: None}
    with pytest.raises(ConnectionError, match="no route"):
        drafted(awaited, [5, 6], open_gates=[6])
    assert drafted(awaited, [5, 6, 7], open_gates=[7]) == [[]]
    with pytest.raises(TypeError, match="ask returned None; it returns a list of token ids"):
        drafted(awaited, [5, 6, 7, 8], open_gates=[8])
    assert figures(awaited) == {"asked": 3, "errors": 3}
    assert drafted(awaited, [5, 6, 7, 8, 9], open_gates=[9]) == [[10, 11, 12]]


def test_few_threads_ask_in_turn():
    made = Counting(config(None, num_threads=1))
    assert drafted(made, [1], [11], [21], open_gates=[1, 11, 21]) == [[2, 3, 4], [12, 13, 14], [22, 23, 24]]
    assert len(threads_of(made)) == 1
    made.close()


def test_close_ends_the_threads_and_leaves_out_what_nobody_began():
    made = Counting(config(0, num_threads=1))
    drafted(made, [1], [2])
    _, second = in_flight(made)
    closing = threading.Thread(target=made.close)
    closing.start()
    wait([second])
    made.gates[1].set()
    closing.join()
    assert threads_of(made) == []
    assert second.cancelled()
    assert 2 not in made.asked


def test_close_does_not_wait_for_a_call_that_hangs(service, monkeypatch, caplog):
    monkeypatch.setattr("specdec.sdk.late_proposer.CLOSE_SECONDS", 0.0)
    drafted(service, [1])
    while 1 not in service.asked:
        pass
    service.close()
    assert "Counting.ask still runs" in caplog.text


def test_calls_that_hang_share_the_time_that_close_waits(monkeypatch):
    class Hanging:
        def join(self, timeout):
            now[0] += timeout

        def is_alive(self):
            return True

    now = [5.0]
    monkeypatch.setattr(late_proposer, "monotonic", lambda: now[0])
    made = Counting(config(0))
    made._threads._threads.extend([Hanging(), Hanging(), Hanging()])
    made.close()
    assert now[0] == 5.0 + late_proposer.CLOSE_SECONDS


def test_close_before_any_question_starts_no_thread():
    made = Counting(config(0))
    made.close()
    assert threads_of(made) == []


def test_a_proposer_that_nobody_closed_ends_its_threads():
    made = Counting(config(None))
    drafted(made, [1], open_gates=[1])
    [thread] = threads_of(made)
    gone = weakref.ref(made)
    del made
    gc.collect()
    thread.join()
    assert gone() is None


class Echo(LateProposer):
    """Asks a service that answers with the newest token."""

    def ask(self, request, tokens, k):
        return [tokens[-1]] * k


class Broken(LateProposer):
    """Its service is down."""

    def ask(self, request, tokens, k):
        raise ConnectionError("connection refused")  # the author's line


PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9, 8]}]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def llm(cls, deadline_ms=None):
    asked = {"method": f"{__name__}:{cls.__name__}", "num_speculative_tokens": K}
    return LLM("tiny", speculative_config={**asked, "proposer_config": {"deadline_ms": deadline_ms}})


def generated(engine):
    return [list(each.outputs[0].token_ids) for each in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("deadline_ms", [None, 0])
def test_the_text_is_that_of_plain_decoding_whenever_answers_come(deadline_ms):
    with llm(Echo, deadline_ms) as engine:
        assert generated(engine) == generated(LLM("tiny"))
        values = {each.name.rpartition("_")[2]: each.value for each in engine.get_metrics() if "proposer_" in each.name}
    assert values["asked"] > 1
    assert threads_of(Echo(config(0))) == []


def test_an_engine_shows_a_services_error_once_with_the_authors_line():
    with llm(Broken) as engine:
        with pytest.raises(ProposerError, match="ConnectionError: connection refused") as error:
            engine.generate(PROMPTS, GREEDY)
        assert f"{__file__}:" in str(error.value)
        assert "in ask" in str(error.value)
        assert len(generated(engine)) == 2


@pytest.mark.parametrize("deadline_ms", [None, 0])
def test_it_keeps_the_contract(deadline_ms):
    found = check_proposer(Echo, speculative_config={"proposer_config": {"deadline_ms": deadline_ms}})
    assert [each.text for each in found if each.status not in ("passed", "skipped")] == []
