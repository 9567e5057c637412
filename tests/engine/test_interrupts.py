"""Ctrl-C at any line of a step leaves tokens, texts, counters and what listeners were told in agreement."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from engine_helpers import make_llm

import specdec.core
from specdec import SamplingParams
from specdec.core.engine.turn import Turn
from specdec.core.runner.request_progress import uninterrupted

CORE = Path(specdec.core.__file__).parent
BOOKS = ("runner/step.py", "runner/request_progress.py", "request/request.py", "request/metrics.py")
BOOKS = {str(CORE / name) for name in BOOKS}
QUEUES = ("runner/scheduler.py", "cache/block_pool.py", "cache/row_table.py")
QUEUES = {str(CORE / name) for name in QUEUES}
HELD = ("uninterrupted", "<lambda>")  # it holds interrupts back, and few of its own lines are open to one
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)


class InterruptAt:
    """Sends SIGINT at the n-th line that runs in the files that keep the books."""

    def __init__(self, number: int, files=BOOKS) -> None:
        self.left, self.files = number, files

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in self.files or frame.f_code.co_name in HELD:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.fixture(scope="module")
def llm():
    with make_llm("ngram") as llm:
        yield llm


def interrupted(llm, prompts, number):
    """Run requests with an interrupt at a line of their second step. Returns them, and what they were told of."""
    engine, told = llm.engine, Counter()
    names = [engine.add_request({"prompt_token_ids": prompt}, PARAMS) for prompt in prompts]
    requests = [engine.get_request(name) for name in names]
    for name in names:
        engine.listeners[name] = lambda each: told.update({each.request.request_id: len(each.token_ids)})
    engine.step()
    interrupt = InterruptAt(number)
    try:
        sys.settrace(interrupt)
        engine.step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.listeners.keys().isdisjoint(names), "one that ended has nothing more to tell"
    return requests, told, interrupt.left <= 0


@pytest.mark.slow
def test_an_interrupt_at_any_line_keeps_the_books_in_order(llm, prompts, truth):
    asked, number, happened = prompts[:2], 1, True
    expected = [output.outputs[0] for output in llm.generate([{"prompt_token_ids": each} for each in asked], PARAMS)]
    while happened:
        before = llm.engine.metrics.acceptance.num_committed_tokens
        requests, told, happened = interrupted(llm, asked, number)
        assert [tuple(request.output_token_ids) for request in requests] == [each.token_ids for each in expected]
        assert [request.detokenizer.text(finished=True) for request in requests] == [each.text for each in expected]
        assert [len(request.logprobs) for request in requests] == [PARAMS.max_tokens] * len(asked), number
        assert [request.metrics.num_committed_tokens for request in requests] == [PARAMS.max_tokens] * len(asked)
        assert told == {request.request_id: PARAMS.max_tokens for request in requests}
        assert llm.engine.metrics.acceptance.num_committed_tokens - before == PARAMS.max_tokens * len(asked)
        llm.engine.check_integrity()
        number += 5
    assert number > 100, "lines were traced"


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_queues_rows_and_blocks_leaves_an_engine_that_serves(prompts):
    params, number, happened = PARAMS.replace(max_tokens=3), 1, True
    asked = [{"prompt_token_ids": each[:20]} for each in prompts[:2]]
    with make_llm("ngram", max_num_seqs=1, max_model_len=64, num_kv_blocks=4) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(asked, params)]
        while happened:
            interrupt = InterruptAt(number, QUEUES)
            try:
                sys.settrace(interrupt)
                llm.generate(asked, params)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            llm.engine.check_integrity()
            requests = [llm.engine.get_request(llm.engine.add_request(each, params)) for each in asked]
            for _ in range(3 * params.max_tokens):  # one that was being queued may be left, and ends by itself
                llm.engine.step()
            assert not llm.engine.has_unfinished_requests
            assert [tuple(request.output_token_ids) for request in requests] == expected, number
            number, happened = number + 19, interrupt.left <= 0
    assert number > 100, "lines were traced"


def test_an_interrupt_while_a_thread_comes_in_leaves_the_engine_to_others():
    turn, number, happened, came_in = Turn(lambda: None), 1, True, []

    def come_in():
        with turn.taken("step", alone=True):
            came_in.append(number)

    while happened:
        interrupt = InterruptAt(number, {str(CORE / "engine/turn.py")})
        try:
            sys.settrace(interrupt)
            with turn.taken("step", alone=True):
                sys.settrace(None)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        thread = threading.Thread(target=come_in)
        thread.start()
        thread.join()
        assert came_in[-1:] == [number]
        number, happened = number + 1, interrupt.left <= 0
    assert number > 8, "lines were traced"


def test_an_interrupt_is_held_back_to_the_end_of_the_block():
    done = []

    def work():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM, signal.SIGTERM])
def test_a_handler_of_the_users_own_is_called_after_the_block(number):
    """It may raise: a timeout by an alarm, an end by SIGTERM."""
    told = []
    earlier = signal.signal(number, lambda *interrupt: told.append(interrupt[0]))
    try:
        with uninterrupted():
            signal.raise_signal(number)
            assert not told
        assert told == [number]
    finally:
        signal.signal(number, earlier)


def test_of_two_signals_both_are_told_whatever_one_of_them_raises():
    told = []
    earlier = signal.signal(signal.SIGTERM, lambda *interrupt: told.append(interrupt[0]))

    def both():
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            both()
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_what_nobody_handles_is_left_as_it_is():
    before = signal.getsignal(signal.SIGALRM)
    with uninterrupted():
        assert signal.getsignal(signal.SIGALRM) == before == signal.SIG_DFL


def test_an_error_in_the_block_stays_what_it_is_and_the_handler_comes_back():
    with pytest.raises(ValueError, match="of the block"), uninterrupted():
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_leaves_the_handler_alone():
    seen = []

    def work():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
