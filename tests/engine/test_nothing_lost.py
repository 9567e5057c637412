"""One failure harms nobody else: every committed token is delivered once, every start has its end, counters add up."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from engine_helpers import GREEDY, counter, make_llm
from erratic_proposer import ERRORS, METHODS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from inside import host_of, listen, proposer_of
from sweeps import covering

from specdec.sdk import ProposerError, hookimpl
from specdec.sdk.errors import RequestError

POLICIES = ("raise", "skip_step", "disable")
FAULTS = st.tuples(st.sampled_from(METHODS), st.integers(0, 9), st.sampled_from([*ERRORS, "no draft"]))


class Listener:
    """Everything that hooks are told, and what a hook does about it."""

    def __init__(self):
        self.events, self.stats, self.errors = [], [], []
        self.then = {}  # hook name -> what it does

    def heard(self, hook, what):
        self.events.append((hook, what))
        self.then.get(hook, lambda what: None)(what)

    @hookimpl
    def on_request_start(self, request):
        self.heard("start", request.request_id)

    @hookimpl
    def on_request_finished(self, request):
        self.heard("finished", request.request_id)

    @hookimpl
    def on_step(self, stats):
        self.stats.append(stats)
        self.heard("step", stats.step)

    @hookimpl
    def on_proposer_error(self, error):
        self.errors.append(error)
        self.heard("error", error.code)

    def counted(self, event):
        return Counter(what for hook, what in self.events if hook == event)


def erratic(sequences, faults=(), policy="raise", **llm_settings):
    options = {"sequences": sequences, "faults": faults, "wrong_every": 3}
    speculative = {"method": "erratic_proposer:Erratic", "on_proposer_error": policy}
    return listened(make_llm("ngram", options=options, speculative=speculative, **llm_settings))


def listened(llm):
    listener = Listener()
    listen(llm, listener)
    return llm, listener


def params(count):
    return GREEDY.replace(max_tokens=count)


def ids(prompt):
    return {"prompt_token_ids": prompt}


class Reader:
    """Reads one stream, an update at a time, and keeps what it was given."""

    def __init__(self, llm, prompt, count):
        self.stream = llm.stream(ids(prompt), params(count))
        self.updates, self.error, self.open = [], None, True

    def read(self):
        try:
            self.updates.append(next(self.stream))
        except StopIteration:
            self.open = False
        except ProposerError as error:
            self.open, self.error = False, error

    def read_all(self):
        while self.open:
            self.read()
        return self

    @property
    def token_ids(self):
        return [token_id for update in self.updates for token_id in update.token_ids]

    @property
    def text(self):
        return "".join(update.text for update in self.updates)

    @property
    def reasons(self):
        return [update.finish_reason for update in self.updates if update.finish_reason is not None]


# -- a proposer's errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["propose", "observe", "on_start", "on_finish"])
def test_a_raised_error_costs_nobody_a_token(method, prompts, truth, sequences):
    llm, listener = erratic(sequences, [(method, 1, "error")])
    other, failing = Reader(llm, prompts[3], 12), Reader(llm, prompts[4], 12)
    other.read()
    failing.read_all()
    other.read_all()
    assert (failing.error or other.error).code == "SD-E210"
    for reader, expected in [(other, truth[3]), (failing, truth[4])]:
        assert reader.token_ids == expected[: len(reader.token_ids)]
        assert len(reader.reasons) == 1
        assert reader.error or reader.token_ids == expected[:12]
    assert listener.counted("start") == listener.counted("finished") == {"0": 1, "1": 1}
    assert sum(stats.num_committed_tokens for stats in listener.stats) == len(other.token_ids + failing.token_ids)
    assert counter(llm, "num_steps") == len(listener.stats)


def test_a_caller_that_steps_on_after_every_error_misses_no_step(prompts, truth, sequences):
    llm, listener = erratic(sequences, [("propose", number, "error") for number in range(100)])
    request = llm.engine.get_request(llm.engine.add_request(prompts[3], params(12)))
    num_errors = 0
    while llm.engine.has_unfinished_requests:
        try:
            llm.engine.step()
        except ProposerError:
            num_errors += 1
    assert request.output_token_ids == truth[3][:12]
    assert counter(llm, "num_steps") == len(listener.stats) == 12
    assert num_errors == counter(llm, "proposer_propose_calls") > 8


@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
def test_what_is_raised_while_an_error_ends_requests_is_a_note_of_that_error(streamed, prompts, sequences):
    llm, _ = erratic(sequences, [("observe", 0, "error"), ("on_finish", 0, "panic"), ("on_finish", 1, "error")])
    call = llm.stream if streamed else llm.generate
    with pytest.raises(ProposerError, match="observe raised RuntimeError") as caught:
        list(call([ids(prompt) for prompt in prompts[3:5]], params(8)))
    assert [note.splitlines()[0].split()[1:4] for note in caught.value.__notes__] == [
        ["on_finish", "raised", "Panic:"],
        ["on_finish", "raised", "RuntimeError:"],
    ]
    assert llm.engine.metrics.proposer_errors == {"SD-E210": 3}


def test_every_request_that_ends_in_a_step_is_told_of_where_one_of_them_fails(prompts, sequences):
    llm, _ = erratic(sequences, [("on_finish", 0, "error"), ("on_finish", 1, "panic")])
    with pytest.raises(ProposerError) as caught:
        llm.generate([ids(prompt) for prompt in prompts[3:6]], params(1))
    assert [event for event in proposer_of(llm).events if event[0] == "on_finish"] == [
        ("on_finish", name) for name in "012"
    ]
    (note,) = caught.value.__notes__
    assert "Panic: on purpose" in note


def test_every_preempted_request_is_told_of_where_one_of_them_fails(prompts, truth, sequences):
    llm, _ = erratic(sequences, [("on_preempt", 0, "error")], num_kv_blocks=12)
    requests = [
        llm.engine.get_request(llm.engine.add_request(prompt, params(40), str(index)))
        for index, prompt in enumerate(prompts[3:6])
    ]
    errors = 0
    while llm.engine.has_unfinished_requests:
        try:
            llm.engine.step()
        except ProposerError:
            errors += 1
        llm.engine.check_integrity()
    assert [request.output_token_ids for request in requests] == [output[:40] for output in truth[3:6]]
    assert errors == 1
    told = [event for event in proposer_of(llm).events if event[0] == "on_preempt"]
    assert len(told) == counter(llm, "num_preemptions") > 0


@pytest.mark.parametrize(("fault", "policy"), covering(list(ERRORS), POLICIES))
def test_whatever_is_raised_is_a_proposers_error(fault, policy, prompts, truth, sequences):
    llm, listener = erratic(sequences, [("propose", 0, fault), ("observe", 2, fault)], policy)
    errors = []
    name = llm.engine.add_request(prompts[3], params(8))
    request = llm.engine.get_request(name)
    while llm.engine.has_unfinished_requests:
        try:
            llm.engine.step()
        except ProposerError as error:
            errors.append(error)
    assert request.output_token_ids == truth[3][:8]
    told = errors if policy == "raise" else listener.errors
    assert [error.code for error in told] == ["SD-E210", "SD-E210"]
    assert all("erratic_proposer:Erratic" in str(error) for error in told)


def test_an_interrupt_is_the_users_and_loses_nothing(prompts, truth, sequences, monkeypatch):
    llm, listener = erratic(sequences)
    monkeypatch.setattr(proposer_of(llm), "trip", lambda method: (_ for _ in ()).throw(KeyboardInterrupt))
    host_of(llm)._methods.clear()
    other = Reader(llm, prompts[3], 6)
    with pytest.raises(KeyboardInterrupt):
        other.read()
    assert [stats.num_committed_tokens for stats in listener.stats] == [1]
    assert listener.counted("start") == listener.counted("finished") == {"0": 1}


# -- aborts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["start", "step", "error"])
def test_a_hook_may_abort_a_request_in_the_middle_of_a_step(hook, prompts, truth, sequences):
    llm, listener = erratic(sequences, [("propose", 1, "error")], "skip_step")
    listener.then[hook] = lambda what: llm.abort("0")
    outputs = llm.generate([ids(prompts[3]), ids(prompts[4])], params(8))
    assert outputs[0].outputs[0].finish_reason == "abort"
    assert list(outputs[1].outputs[0].token_ids) == truth[4][:8]
    assert listener.counted("start") == listener.counted("finished") == {"0": 1, "1": 1}
    llm.engine.check_integrity()


@pytest.mark.parametrize("hook", ["step", "finished"])
def test_what_a_step_ended_stays_as_it_ended(hook, prompts, sequences):
    llm, listener = erratic(sequences)
    listener.then[hook] = lambda what: llm.abort("0")
    (output,) = llm.generate([ids(prompts[3])], params(1))
    assert output.outputs[0].finish_reason == "length"
    assert listener.counted("finished") == {"0": 1}


def test_a_hook_that_aborts_others_on_a_finish_ends_each_once(prompts, sequences):
    llm, listener = erratic(sequences)
    listener.then["finished"] = lambda what: [llm.abort(name) for name in "012"]
    llm.generate([ids(prompt) for prompt in prompts[3:6]], [params(count) for count in (2, 30, 30)])
    assert listener.counted("finished") == {"0": 1, "1": 1, "2": 1}


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_stream_that_is_ended_says_so(end, prompts, truth):
    llm = make_llm()
    reader = Reader(llm, prompts[3], 20)
    for _ in range(3):
        reader.read()
    llm.abort(reader.updates[0].request_id) if end == "abort" else llm.close()
    reader.read_all()
    assert reader.token_ids == truth[3][:3]
    assert reader.reasons == ["abort"]


@pytest.mark.parametrize("num_ended", [0, 1])
def test_to_end_a_prompt_ends_all_its_outputs(num_ended, prompts):
    """Also where the first one, whose request has the id of the prompt, ended before."""
    llm = make_llm()
    stream = llm.stream(ids(prompts[3]), params(20).replace(n=3))
    first = next(stream)
    if num_ended:
        llm.engine.abort(first.request_id)
    llm.abort(first.request_id)
    assert {each.index: each.finish_reason for each in stream} == dict.fromkeys(range(3), "abort")
    assert not llm.engine.has_unfinished_requests
    llm.engine.check_integrity()


# -- two callers at once -----------------------------------------------------------------------------------------


def outcome_of(call):
    """What a call gives or raises in a thread of its own."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("call", ["generate", "step", "add_request", "close", "stream"])
def test_a_second_thread_is_refused_and_the_first_goes_on(call, prompts, truth, sequences):
    llm, listener = erratic(sequences)
    calls = {
        "generate": lambda: llm.generate([ids(prompts[4])], params(4)),
        "step": llm.engine.step,
        "add_request": lambda: llm.engine.add_request(prompts[4], params(4)),
        "close": llm.close,
        "stream": lambda: next(llm.stream(ids(prompts[4]), params(4))),
    }
    intruders = []
    listener.then["step"] = lambda what: intruders.append(outcome_of(calls[call]))
    (output,) = llm.generate([ids(prompts[3])], params(12))
    assert list(output.outputs[0].token_ids) == truth[3][:12]
    assert len(intruders) == len(listener.stats)
    refused = intruders[: -1 if call == "step" else None]  # after the last request a step has nothing to do
    assert all(isinstance(error, RequestError) and error.code == "SD-E177" for error in refused)
    assert not llm.engine.has_unfinished_requests


def test_any_thread_may_abort(prompts, truth, sequences):
    llm, listener = erratic(sequences)
    listener.then["step"] = lambda number: number == 2 and outcome_of(lambda: llm.abort("0"))
    outputs = llm.generate([ids(prompts[3]), ids(prompts[4])], params(12))
    assert outputs[0].outputs[0].finish_reason == "abort"
    assert len(outputs[0].outputs[0].token_ids) < 12
    assert list(outputs[1].outputs[0].token_ids) == truth[4][:12]
    assert listener.counted("finished") == {"0": 1, "1": 1}


@pytest.mark.parametrize("call", ["stream", "add_request"])
def test_a_thread_that_aborts_between_steps_is_waited_for(call, prompts, truth, sequences):
    llm, listener = erratic(sequences)
    stream, inside, asked = llm.stream(ids(prompts[3]), params(12)), threading.Event(), threading.Event()
    llm.engine.add_request(ids(prompts[4]), params(12), "other")
    updates = [next(stream)]
    listener.then["finished"] = lambda name: name == "other" and (inside.set(), asked.wait(0.3))
    thread = threading.Thread(target=llm.abort, args=["other"])
    thread.start()
    assert inside.wait(60)
    if call == "add_request":
        llm.engine.add_request(ids(prompts[5]), params(2))
    updates += stream
    thread.join()
    assert [token_id for update in updates for token_id in update.token_ids] == truth[3][:12]
    assert listener.counted("finished")["other"] == 1


@pytest.mark.parametrize("call", ["step", "close", "generate"])
def test_a_step_within_a_step_is_refused(call, prompts, truth, sequences, monkeypatch):
    llm, _ = erratic(sequences, policy="skip_step")
    proposer, calls = proposer_of(llm), {"step": llm.engine.step, "close": llm.close}
    calls["generate"] = lambda: llm.generate([ids(prompts[4])], params(2))
    monkeypatch.setattr(proposer, "trip", lambda method: method == "propose" and calls[call]())
    (output,) = llm.generate([ids(prompts[3])], params(6))
    assert list(output.outputs[0].token_ids) == truth[3][:6]
    assert llm.engine.metrics.proposer_errors == {"SD-E210": counter(llm, "proposer_propose_calls")} != {}
    assert not llm.engine.has_unfinished_requests


# -- all of it at random -----------------------------------------------------------------------------------------


@st.composite
def runs(draw):
    return {
        "policy": draw(st.sampled_from(POLICIES)),
        "faults": draw(st.lists(FAULTS, max_size=5)),
        "num_kv_blocks": draw(st.integers(8, 20)),
        "lengths": draw(st.lists(st.integers(1, 20), min_size=2, max_size=4)),
        "actions": draw(
            st.lists(
                st.tuples(st.sampled_from(["read", "step", "abort", "abort in a hook"]), st.integers(0, 3)), max_size=30
            )
        ),
    }


def act(llm, listener, readers, action, index):
    reader = readers[index % len(readers)]
    if action == "read" and reader.open:
        reader.read()
    if action == "step":
        try:
            llm.engine.step()
        except ProposerError as error:
            return error
    if action == "abort":
        try:
            llm.abort(str(index))
        except ProposerError as error:
            return error
    if action == "abort in a hook":
        listener.then["step"] = lambda number: number % 4 == 0 and llm.abort(str(index))
    return None


def nothing_is_lost(run, prompts, truth, sequences, tokenizer):
    llm, listener = erratic(sequences, run["faults"], run["policy"], num_kv_blocks=run["num_kv_blocks"])
    chosen = range(3, 3 + len(run["lengths"]))
    readers = [Reader(llm, prompts[at], count) for at, count in zip(chosen, run["lengths"], strict=True)]
    errors = []
    for action in [*run["actions"], *(("read", index) for index in list(range(4)) * 40)]:
        errors.append(act(llm, listener, readers, *action))
        llm.engine.check_integrity()
    assert not any(reader.open for reader in readers)
    assert not llm.engine.has_unfinished_requests
    for reader, at, count in zip(readers, chosen, run["lengths"], strict=True):
        assert reader.token_ids == truth[at][: len(reader.token_ids)]
        assert reader.text == tokenizer.decode(reader.token_ids, skip_special_tokens=True)
        assert len(reader.reasons) == 1
        assert (reader.reasons == ["length"]) == (len(reader.token_ids) == count)
        assert reader.updates[-1].finish_reason == reader.reasons[0]
    pairs_match(llm, listener)
    counters_add_up(llm, listener, readers, [error for error in [*errors, *(r.error for r in readers)] if error])


def pairs_match(llm, listener):
    assert listener.counted("start") == listener.counted("finished")
    assert set(listener.counted("start").values()) <= {1}
    if host_of(llm).enabled:
        events = proposer_of(llm).events
        starts, ends = ([name for event, name in events if event == hook] for hook in ("on_start", "on_finish"))
        assert sorted(starts) == sorted(ends) == sorted(set(starts))


def counters_add_up(llm, listener, readers, raised):
    stats, acceptance = listener.stats, llm.engine.metrics.acceptance
    assert [each.step for each in stats] == list(range(1, counter(llm, "num_steps") + 1))
    num_tokens = sum(len(reader.token_ids) for reader in readers)
    assert sum(each.num_committed_tokens for each in stats) == acceptance.num_committed_tokens == num_tokens
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(each, name) for each in stats) == getattr(acceptance, name)
    notes = sum(len(getattr(error, "__notes__", ())) for error in raised)
    told = len(listener.errors) if not raised else len(raised) + notes
    assert sum(llm.engine.metrics.proposer_errors.values()) == told


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture(scope="module")
def check(prompts, truth, sequences, tokenizer):
    return lambda run: nothing_is_lost(run, prompts, truth, sequences, tokenizer)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=QUIET)
@given(run=runs())
def test_nothing_is_lost(run, check):
    check(run)


@pytest.mark.full
@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@given(run=runs())
def test_nothing_is_lost_at_length(run, check):
    check(run)
