"""A proposer that fails is named and contained; what is generated never changes."""

from __future__ import annotations

import pytest
from engine_helpers import GREEDY, assert_same_tokens, counter, make_llm, run, tokens
from engine_proposers import WRONG, Faulty
from inside import pool_of, proposer_of, scheduler_of

from specdec.sdk import ConfigError, ProposerError
from specdec.sdk.errors import PluginLoadError

NAME = "engine_proposers:Faulty"
NUM_TOKENS = 12
PARAMS = GREEDY.replace(max_tokens=NUM_TOKENS)
DISTRIBUTIONS = {
    "an undeclared kind": "one_hot",
    "an unknown kind": "dense",
    "a kind without its tensor": "dense",
    "a distribution of another shape": "dense",
    "a distribution on another device": "dense",
    "a distribution of integers": "dense",
    "probabilities of half the mass": "dense",
    "negative probabilities": "dense",
    "probabilities that are no numbers": "dense",
}
ARMED = ("nothing", "an unknown kind")
CODES = {
    "nothing": "SD-E200",
    "a list": "SD-E200",
    "a generator": "SD-E200",
    "a class": "SD-E200",
    "lists in a draft": "SD-E201",
    "a transposed draft": "SD-E201",
    "a flat draft": "SD-E201",
    "a row too few": "SD-E201",
    "a column too many": "SD-E201",
    "ids as floats": "SD-E201",
    "a huge draft": "SD-E201",
    "ids on another device": "SD-E201",
    "lengths as floats": "SD-E201",
    "lengths as bools": "SD-E201",
    "a negative length": "SD-E202",
    "a length over the budget": "SD-E202",
    "lengths without end": "SD-E202",
    "an id over the vocabulary": "SD-E203",
    "padding within the length": "SD-E203",
    "a sentinel within the length": "SD-E203",
    "a tensor as its distribution": "SD-E204",
    "an undeclared kind": "SD-E204",
    "an unknown kind": "SD-E204",
    "a kind without its tensor": "SD-E201",
    "a distribution of another shape": "SD-E201",
    "a distribution on another device": "SD-E201",
    "a distribution of integers": "SD-E201",
    "probabilities of half the mass": "SD-E205",
    "negative probabilities": "SD-E205",
    "probabilities that are no numbers": "SD-E205",
}


@pytest.fixture
def short_prompts(prompts):
    return prompts[3:8]


@pytest.fixture
def short_truth(truth):
    return truth[3:8]


def faulty(sequences, where, policy="raise", *, fault="raise", after=0, times=1_000_000, **settings):
    distribution = DISTRIBUTIONS.get(fault, "one_hot")
    options = {
        "where": where,
        "fault": fault,
        "after": after,
        "times": times,
        "sequences": sequences,
        "distributions": () if distribution == "one_hot" else (distribution,),
    }
    speculative = {"on_proposer_error": policy}
    speculative |= {"draft_sample_method": "probabilistic"} if distribution == "dense" else {}
    return make_llm("Faulty", options=options, speculative=speculative, **settings)


def declared(fault):
    return DISTRIBUTIONS.get(fault, "one_hot")


def generate(llm, prompts, params=PARAMS):
    return tokens(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params))


def errors_by_code(llm):
    name = "specdec:spec_decode_proposer_errors"
    return {metric.labels["code"]: metric.value for metric in llm.get_metrics() if metric.name == name}


def assert_nothing_left(llm):
    engine = llm.engine
    assert not engine.has_unfinished_requests
    assert not [*scheduler_of(engine).waiting, *scheduler_of(engine).running]
    assert pool_of(engine).num_free == pool_of(engine).num_blocks
    engine.check_integrity()


def test_every_wrong_draft_has_its_code():
    assert CODES.keys() == WRONG.keys()


@pytest.fixture(scope="module")
def wrong_once(sequences):
    """Engines by what is declared whose proposer is armed for one wrong draft, the second."""
    return {declared(fault): faulty(sequences, "propose", fault=fault, after=1, times=1) for fault in ARMED}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_draft_is_named_then_contained(fault, short_prompts, short_truth, wrong_once):
    llm = wrong_once[declared(fault)]
    proposer_of(llm).arm(fault)
    errors_before = errors_by_code(llm).get(CODES[fault], 0)
    with pytest.raises(ProposerError) as caught:
        generate(llm, short_prompts[:2])
    assert caught.value.code == CODES[fault]
    assert NAME in str(caught.value)
    assert caught.value.facts
    assert_nothing_left(llm)
    assert generate(llm, short_prompts[:2]) == [output[:NUM_TOKENS] for output in short_truth[:2]], (
        "the engine can go on"
    )
    assert errors_by_code(llm)[CODES[fault]] == errors_before + 1


@pytest.mark.parametrize("policy", ["skip_step", "disable"])
@pytest.mark.parametrize(
    "fault", ["nothing", "a transposed draft", "padding within the length", "negative probabilities"]
)
def test_wrong_drafts_change_nothing_that_is_generated(fault, policy, short_prompts, short_truth, sequences):
    llm = faulty(sequences, "propose", policy, fault=fault)
    assert generate(llm, short_prompts[:2]) == [output[:NUM_TOKENS] for output in short_truth[:2]]
    assert counter(llm, "spec_decode_num_draft_tokens") == 0
    expected = 3 if policy == "disable" else counter(llm, "proposer_propose_calls")
    assert errors_by_code(llm) == {CODES[fault]: expected}


def test_a_wrong_draft_names_request_place_and_limits(short_prompts, sequences):
    llm = faulty(sequences, "propose", fault="an id over the vocabulary")
    with pytest.raises(ProposerError, match=r"(?s)'0', row 0 of the step, draft position 0.*0 \.\. 4095.*4096"):
        generate(llm, short_prompts[:1])
    llm = faulty(sequences, "propose", fault="a transposed draft")
    with pytest.raises(ProposerError, match=r"(?s)expected \(2, 4\), found \(4, 2\)   looks transposed"):
        generate(llm, short_prompts[:2])


@pytest.mark.parametrize("method", ["propose", "observe", "on_start", "on_finish"])
def test_an_exception_is_named_and_leaves_a_working_engine(method, short_prompts, short_truth, sequences):
    llm = faulty(sequences, method, after=1, times=1)
    with pytest.raises(ProposerError) as caught:
        generate(llm, short_prompts[:3])
    message = str(caught.value)
    assert caught.value.code == "SD-E210"
    assert NAME in message
    assert f"{method} raised RuntimeError: {method} fails on purpose" in message
    assert "engine_proposers.py" in message
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_nothing_left(llm)
    assert generate(llm, short_prompts[:3]) == [output[:NUM_TOKENS] for output in short_truth[:3]]


def test_a_proposer_that_fails_at_every_finish_holds_nothing_back(short_prompts, sequences):
    llm = faulty(sequences, "on_finish")
    with pytest.raises(ProposerError):
        generate(llm, short_prompts[:3], [PARAMS.replace(max_tokens=count) for count in (3, 9, 9)])
    assert_nothing_left(llm)
    llm.engine.add_request(short_prompts[0], PARAMS)
    llm.engine.add_request(short_prompts[1], PARAMS)
    llm.engine.step()
    with pytest.raises(ProposerError):
        llm.close()
    assert_nothing_left(llm)
    assert proposer_of(llm).events[-1] == ("close", "")


def test_an_engine_that_is_stepped_on_after_an_error_finishes_everybody(short_prompts, short_truth, sequences):
    llm = faulty(sequences, "propose", after=2, times=2)
    requests = []
    for index in range(3):
        name = llm.engine.add_request(short_prompts[index], GREEDY.replace(max_tokens=[48, 4, 48][index]))
        requests.append(llm.engine.get_request(name))
    num_errors = 0
    while llm.engine.has_unfinished_requests:
        try:
            llm.engine.step()
        except ProposerError:
            num_errors += 1
        llm.engine.check_integrity()
    assert num_errors == 2
    assert [request.output_token_ids for request in requests] == [
        short_truth[0],
        short_truth[1][:4],
        short_truth[2],
    ]
    assert_nothing_left(llm)


@pytest.mark.parametrize("policy", ["skip_step", pytest.param("disable", marks=pytest.mark.full)])
@pytest.mark.parametrize("method", ["propose", "observe", "on_start", "on_finish", "on_preempt"])
def test_exceptions_change_nothing_that_is_generated(
    method, policy, short_prompts, short_truth, sequences, reference_model
):
    llm = faulty(sequences, method, policy, num_kv_blocks=14)
    outputs = generate(llm, short_prompts[:4], GREEDY)
    assert_same_tokens(outputs, short_truth[:4], short_prompts[:4], reference_model)
    assert counter(llm, "num_preemptions") > 0
    num_errors = errors_by_code(llm)["SD-E210"]
    assert num_errors == (min(3, num_errors) if policy == "disable" else proposer_of(llm).num_calls[method])
    assert_nothing_left(llm)


def test_a_failure_now_and_then_costs_only_that_steps_drafts(short_prompts, short_truth, sequences):
    llm = faulty(sequences, "propose", "skip_step", after=1, times=1)
    assert generate(llm, short_prompts[:1]) == [short_truth[0][:NUM_TOKENS]]
    assert errors_by_code(llm) == {"SD-E210": 1}
    assert counter(llm, "spec_decode_num_accepted_tokens") > 5


def test_the_log_has_the_first_error_of_each_kind_and_then_their_number_now_and_then(short_prompts, sequences, caplog):
    llm = faulty(sequences, "propose", "skip_step")
    generate(llm, short_prompts[:3], GREEDY)
    num_errors = errors_by_code(llm)["SD-E210"]
    assert num_errors > 10
    logged = [record.getMessage() for record in caplog.records if "on purpose" in record.getMessage()]
    assert [text.rpartition(" ")[2] for text in logged] == [str(10**n) for n in range(len(str(int(num_errors))))]
    proposer_of(llm).arm("exit")
    generate(llm, short_prompts[:1])
    assert "SystemExit" in caplog.records[-1].getMessage(), "another kind is said at once"


def test_disabled_after_three_errors_and_never_called_again(short_prompts, short_truth, sequences):
    llm = faulty(sequences, "propose", "disable", after=2)
    assert generate(llm, short_prompts[:2], GREEDY) == short_truth[:2]
    calls = dict(proposer_of(llm).num_calls)
    assert calls["propose"] == 2 + 3
    assert generate(llm, short_prompts[:2], GREEDY) == short_truth[:2]
    assert dict(proposer_of(llm).num_calls) == calls


def test_a_disabled_proposer_is_closed_all_the_same(short_prompts, sequences):
    llm = faulty(sequences, "propose", "disable")
    generate(llm, short_prompts[:1])
    llm.close()
    llm.close()
    assert proposer_of(llm).events.count(("close", "")) == 1


def budgets(recorder, name):
    return [each.budget for step in recorder.steps for each in step if each.request_id == name]


def test_requests_of_a_step_that_was_not_observed_get_no_drafts_any_more(short_prompts, short_truth, sequences):
    llm = faulty(sequences, "observe", "skip_step", after=2, times=1)
    engine, recorder = llm.engine, proposer_of(llm)
    engine.add_request(short_prompts[0], GREEDY, "seen")
    for _ in range(3):
        engine.step()  # the third is not observed
    engine.add_request(short_prompts[1], GREEDY, "fresh")
    finished = run(engine)
    assert all(budgets(recorder, "seen")[:2])
    assert not any(budgets(recorder, "seen")[2:])
    assert max(budgets(recorder, "fresh")) == 4, "who came later was observed from the beginning"
    assert [finished[name].output_token_ids for name in ("seen", "fresh")] == short_truth[:2]


def test_a_step_that_was_not_observed_is_remembered_when_the_error_was_raised(short_prompts, short_truth, sequences):
    llm = faulty(sequences, "observe", after=2, times=1)
    llm.engine.add_request(short_prompts[0], GREEDY, "r")
    llm.engine.step()
    llm.engine.step()
    with pytest.raises(ProposerError):
        llm.engine.step()
    finished = run(llm.engine)
    assert not any(budgets(proposer_of(llm), "r")[2:])
    assert finished["r"].output_token_ids == short_truth[0]


def test_a_replay_makes_a_stale_request_whole_again(short_prompts, short_truth, sequences):
    llm = faulty(sequences, "observe", "skip_step", after=1, times=1, num_kv_blocks=9)
    engine, recorder = llm.engine, proposer_of(llm)
    for index in range(2):
        engine.add_request(short_prompts[index], GREEDY, f"r{index}")
    finished = run(engine)
    assert ("on_preempt", "r1") in recorder.events
    assert not any(budgets(recorder, "r0")[1:])
    generations = [each.generation for step in recorder.steps for each in step if each.request_id == "r1"]
    replayed = budgets(recorder, "r1")[generations.index(max(generations)) :]
    assert any(replayed)
    assert not any(budgets(recorder, "r1")[1 : -len(replayed)])
    assert [finished[f"r{index}"].output_token_ids for index in range(2)] == short_truth[:2]


@pytest.mark.parametrize("policy", ["raise", "skip_step", "disable"])
@pytest.mark.parametrize(
    ("method", "error"), [("__init__", PluginLoadError), ("bind", ProposerError), ("warmup", ProposerError)]
)
def test_failing_before_the_first_request_stops_the_start(method, error, policy, sequences):
    with pytest.raises(error) as caught:
        faulty(sequences, method, policy)
    assert NAME in str(caught.value)
    assert f"{method} fails on purpose" in str(caught.value)


@pytest.mark.parametrize(
    ("where", "settings"), [("warmup", {}), ("nowhere", {"kv_cache_memory_gib": 1e-9})], ids=["warmup", "cache"]
)
def test_what_fails_after_the_proposer_is_bound_closes_it_once(where, settings, sequences, monkeypatch):
    closed = []
    monkeypatch.setattr(Faulty, "close", lambda self: closed.append(self))
    with pytest.raises((ProposerError, ConfigError)):
        faulty(sequences, where, "disable", **settings)
    assert len(closed) == 1


@pytest.mark.parametrize("where", ["warmup", "load"])
def test_a_start_that_fails_saves_nothing_over_what_was_saved(where, sequences, tmp_path, monkeypatch):
    faulty(sequences, "nowhere").save_proposer_state(tmp_path)
    before, closed = (tmp_path / "manifest.json").read_text(), []
    monkeypatch.setattr(Faulty, "close", lambda self: closed.append(self))
    options = {"where": where, "sequences": sequences}
    with pytest.raises(ProposerError, match=f"{where} fails on purpose"):
        make_llm("Faulty", options=options, speculative={"state_dir": str(tmp_path)})
    assert len(closed) == 1
    assert (tmp_path / "manifest.json").read_text() == before


def test_what_closing_raises_stands_beside_why_the_start_failed(sequences, monkeypatch):
    monkeypatch.setattr(Faulty, "close", lambda self: 1 / 0)
    with pytest.raises(ProposerError, match="warmup fails on purpose") as caught:
        faulty(sequences, "warmup")
    assert "close raised ZeroDivisionError" in caught.value.__notes__[0]


@pytest.mark.parametrize("policy", ["raise", "skip_step", "disable"])
@pytest.mark.parametrize("method", ["save", "load"])
def test_state_that_cannot_be_kept_is_always_an_error(method, policy, sequences, tmp_path):
    llm = faulty(sequences, method, policy)
    if method == "load":
        llm.save_proposer_state(tmp_path)
    with pytest.raises(ProposerError, match=f"{method} fails on purpose"):
        getattr(llm, f"{method}_proposer_state")(tmp_path)


def test_an_error_on_closing_is_told_and_everything_is_released(short_prompts, sequences):
    llm = faulty(sequences, "close")
    llm.engine.add_request(short_prompts[0], PARAMS)
    llm.engine.step()
    with pytest.raises(ProposerError, match="close fails on purpose"):
        llm.close()
    assert_nothing_left(llm)
    llm.close()


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_view_is_never_read_back(placement, short_prompts, short_truth, sequences, reference_model):
    sampling = ("temperature", "top_k", "top_p", "min_p")
    options = {"sequences": sequences, "history": True, "sampling": sampling, "hidden_states": ("final",)}
    llm = make_llm(
        "Vandal",
        options=options | {"placement": placement},
        speculative={"on_proposer_error": "skip_step"},
        num_kv_blocks=14,
        max_num_batched_tokens=64,
    )
    params = [GREEDY, GREEDY.replace(speculative=False), GREEDY.replace(num_speculative_tokens=2)]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in short_prompts[:3]], params)
    assert_same_tokens(tokens(outputs), short_truth[:3], short_prompts[:3], reference_model)
    assert outputs[1].outputs[0].spec_decode_metrics["num_draft_tokens"] == 0
    assert errors_by_code(llm).keys() == {"SD-E202", "SD-E220"}, "the real budgets are what drafts are held to"


def test_an_error_names_the_step_in_which_it_came(short_prompts, sequences):
    llm = faulty(sequences, "propose", after=1, times=1)
    with pytest.raises(ProposerError) as raised:
        generate(llm, short_prompts[:1])
    assert raised.value.facts["step"].startswith("2, request ")
