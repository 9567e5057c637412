"""Under load, whatever a proposer does: every request ends with the tokens of plain greedy decoding."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_helpers import GREEDY, counter, make_llm

from specdec.sdk import ProposerError

CHOSEN = (3, 4, 5, 6, 11, 12, 14, 15)  # prompts of 55 to 80 tokens: some run beside each other, none grows in peace
LENGTHS = (3, 18, 20, 12, 6, 10, 16, 9)  # of the outputs
POLICIES = ("raise", "skip_step", "disable")
HOSTILE = {  # fault -> method, declared distribution, code
    "raise": ("propose", "one_hot", "SD-E210"),
    "raise in observe": ("observe", "one_hot", "SD-E210"),
    "raise in on_start": ("on_start", "one_hot", "SD-E210"),
    "raise in on_finish": ("on_finish", "one_hot", "SD-E210"),
    "raise in on_preempt": ("on_preempt", "one_hot", "SD-E210"),
    "raise without a text": ("propose", "one_hot", "SD-E210"),
    "exit": ("propose", "one_hot", "SD-E210"),
    "sleep": ("propose", "one_hot", None),
    "write to the step": ("propose", "one_hot", "SD-E220"),
    "nothing": ("propose", "one_hot", "SD-E200"),
    "a generator": ("propose", "one_hot", "SD-E200"),
    "a huge draft": ("propose", "one_hot", "SD-E201"),
    "ids on another device": ("propose", "one_hot", "SD-E201"),
    "lengths without end": ("propose", "one_hot", "SD-E202"),
    "an id over the vocabulary": ("propose", "one_hot", "SD-E203"),
    "padding within the length": ("propose", "one_hot", "SD-E203"),
    "a tensor as its distribution": ("propose", "one_hot", "SD-E204"),
    "a distribution of another shape": ("propose", "dense", "SD-E201"),
    "a distribution on another device": ("propose", "dense", "SD-E201"),
    "probabilities that are no numbers": ("propose", "dense", "SD-E205"),
}
CASES = [
    pytest.param(fault, policy, marks=() if number % 3 == turn else pytest.mark.full)
    for number, fault in enumerate(HOSTILE)
    for turn, policy in enumerate(POLICIES)
]


@pytest.fixture(scope="module")
def load(prompts):
    return [prompts[index] for index in CHOSEN]


@pytest.fixture(scope="module")
def expected(truth):
    return [truth[index][:length] for index, length in zip(CHOSEN, LENGTHS, strict=True)]


def step_through(llm, prompts):
    """The outputs in the order of the prompts, stepping on after every error; and the errors."""
    requests = []
    for prompt, length in zip(prompts, LENGTHS, strict=False):
        name = llm.engine.add_request(prompt, GREEDY.replace(max_tokens=length))
        requests.append(llm.engine.get_request(name))
    errors = []
    for _ in range(2000):
        if not llm.engine.has_unfinished_requests:
            return [request.output_token_ids for request in requests], errors
        try:
            llm.engine.step()
        except ProposerError as error:
            errors.append(error)
        llm.engine.check_integrity()
    raise AssertionError("requests are lost: they never end")


def errors_by_code(llm):
    name = "specdec:spec_decode_proposer_errors"
    return {metric.labels["code"]: metric.value for metric in llm.get_metrics() if metric.name == name}


@pytest.mark.parametrize(("fault", "policy"), CASES)
def test_every_request_ends_as_if_nobody_had_drafted(fault, policy, load, expected, sequences):
    where, distribution, code = HOSTILE[fault]
    options = {"where": where, "fault": fault.partition(" in ")[0]}
    options |= {"distributions": () if distribution == "one_hot" else (distribution,)}
    options |= {"sequences": sequences, "wrong_every": 3}
    speculative = {"on_proposer_error": policy}
    speculative |= {"draft_sample_method": "probabilistic"} if distribution == "dense" else {}
    llm = make_llm("Faulty", options=options, speculative=speculative, num_kv_blocks=11)
    outputs, errors = step_through(llm, load)
    assert outputs == expected
    counted = errors_by_code(llm)
    assert counted.keys() == ({code} if code else set())
    assert all(error.code == code and "Faulty" in str(error) for error in errors)
    if policy == "raise":
        notes = [note for error in errors for note in getattr(error, "__notes__", ())]
        assert Counter([*(error.code for error in errors), *(note.split()[0] for note in notes)]) == counted
    else:
        assert not errors
        assert policy == "skip_step" or counted.get(code, 0) <= 3, "it is asked no more after three errors"

    again, _ = step_through(llm, load[:1])
    assert again == expected[:1], "the engine can go on"


@pytest.mark.parametrize(
    "policy", ["raise", *(pytest.param(policy, marks=pytest.mark.full) for policy in POLICIES[1:])]
)
def test_state_of_one_request_in_another_costs_acceptance_only(policy, load, expected, sequences):
    llm = make_llm("KeepsByRow", speculative={"on_proposer_error": policy}, num_kv_blocks=11)
    for _ in range(2):
        outputs, errors = step_through(llm, load)
        assert (outputs, errors, errors_by_code(llm)) == (expected, [], {})
    assert counter(llm, "spec_decode_num_draft_tokens") > 0
