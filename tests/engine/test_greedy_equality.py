"""Greedy output is transformers' greedy output, whatever is drafted and however the work is cut up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from engine_helpers import GREEDY, assert_same_tokens, counter, make_llm, run, tokens
from engine_proposers import is_wrong, ragged_length
from inside import verify_with
from sweeps import pairs

from specdec.core.rejection import sampler

K = 4
NUM_TOKENS = GREEDY.max_tokens
PROPOSERS = {
    "none": (None, {}),
    "ngram": ("ngram", {}),
    "truth": ("Scripted", {}),
    "garbage": ("Scripted", {"wrong_every": 1}),
    "sometimes": ("Scripted", {"wrong_every": 3}),
    "ragged": ("Scripted", {"wrong_every": 5, "ragged": True}),
    "noise": ("Noise", {}),
    "host": ("Echo", {}),
}
SCARCE = {"num_kv_blocks": 20, "block_size": 16}
SCARCE_SMALL_BLOCKS = {"num_kv_blocks": 36, "block_size": 8}
CHUNKED = {"max_num_batched_tokens": 48}
ROOMS = {"plain": {}, "chunked": CHUNKED, "scarce": SCARCE, "scarce-chunked": SCARCE_SMALL_BLOCKS | CHUNKED}


def llm_with(name, sequences, **settings):
    proposer, options = PROPOSERS[name]
    if proposer == "Scripted":
        options = options | {"sequences": sequences}
    return make_llm(proposer, k=K, options=options, **settings)


def generate(llm, prompts):
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)


@dataclass
class Expected:
    """Counts of one request that runs alone: what the rules of a step make of scripted drafts."""

    num_steps: int = 1  # the prompt's
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_propose_calls: int = 0


def simulate(num_prompt_tokens, num_output_tokens, wrong_every, ragged):
    expected, committed, end = Expected(), num_prompt_tokens + 1, num_prompt_tokens + num_output_tokens
    while committed < end:
        budget = min(K, end - committed - 1)
        drafted = ragged_length(committed, budget) if ragged else budget
        right = [not is_wrong(position, wrong_every) for position in range(committed, committed + drafted)]
        accepted = [*right, False].index(False)
        expected.num_propose_calls += budget > 0
        expected.num_steps += 1
        expected.num_drafts += drafted > 0
        expected.num_draft_tokens += drafted
        expected.num_accepted += accepted
        committed += accepted + 1
    return expected


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_equals_transformers(name, prompts, truth, sequences, reference_model):
    llm = llm_with(name, sequences)
    for batch_size in (1, 4):
        outputs = generate(llm, prompts[:batch_size])
        assert_same_tokens(tokens(outputs), truth[:batch_size], prompts[:batch_size], reference_model)
    assert counter(llm, "num_preemptions") == 0


@pytest.mark.parametrize("name", ["none", "ngram", "ragged"])
def test_sixteen_mixed_prompts_equal_transformers(name, prompts, truth, sequences, reference_model):
    outputs = generate(llm_with(name, sequences), prompts)
    assert_same_tokens(tokens(outputs), truth, prompts, reference_model)


@pytest.mark.parametrize(
    ("name", "budget"), [("none", 7), ("ngram", 48), ("sometimes", 1), ("sometimes", 7), ("sometimes", 48)]
)
def test_chunked_prefill_equals_transformers(name, budget, prompts, truth, sequences, reference_model):
    count = 1 if budget == 1 else 3
    llm = llm_with(name, sequences, max_num_batched_tokens=budget)
    outputs = generate(llm, prompts[:count])
    assert_same_tokens(tokens(outputs), truth[:count], prompts[:count], reference_model)
    least = sum(len(prompt) for prompt in prompts[:count]) // budget
    assert counter(llm, "num_steps") >= least, "prompts were computed in more than one chunk"


@pytest.mark.parametrize(
    ("name", "scarcity"),
    [("none", SCARCE), ("ngram", SCARCE), ("ragged", SCARCE_SMALL_BLOCKS)],
    ids=["none", "ngram", "ragged"],
)
def test_preempted_requests_equal_transformers(name, scarcity, prompts, truth, sequences, reference_model):
    llm = llm_with(name, sequences, **scarcity, **CHUNKED)
    outputs = generate(llm, prompts[:6])
    assert_same_tokens(tokens(outputs), truth[:6], prompts[:6], reference_model)
    assert counter(llm, "num_preemptions") > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "k", "room"), pairs([name for name in PROPOSERS if name != "none"], [1, 2, 7, 16], list(ROOMS))
)
def test_drafts_of_any_length_in_any_room_equal_transformers(name, k, room, prompts, truth, sequences, reference_model):
    proposer, options = PROPOSERS[name]
    options = options | ({"sequences": sequences} if proposer == "Scripted" else {})
    llm = make_llm(proposer, k=k, options=options, **ROOMS[room])
    outputs = generate(llm, prompts)
    assert_same_tokens(tokens(outputs), truth, prompts, reference_model)


@pytest.mark.parametrize("name", ["truth", "garbage", "sometimes", "ragged"])
def test_counts_of_a_lone_request_are_those_of_the_rules(name, prompts, sequences):
    options = PROPOSERS[name][1]
    llm = llm_with(name, sequences)
    (output,) = generate(llm, prompts[:1])
    expected = simulate(len(prompts[0]), NUM_TOKENS, options.get("wrong_every", 0), options.get("ragged", False))
    found = Expected(
        num_steps=counter(llm, "spec_decode_steps"),
        num_drafts=counter(llm, "spec_decode_num_drafts"),
        num_draft_tokens=counter(llm, "spec_decode_num_draft_tokens"),
        num_accepted=counter(llm, "spec_decode_num_accepted_tokens"),
        num_propose_calls=counter(llm, "proposer_propose_calls"),
    )
    assert found == expected
    assert output.outputs[0].spec_decode_metrics["num_target_steps"] == expected.num_steps


def test_logits_are_computed_only_where_a_token_is_sampled_or_a_draft_verified(prompts, sequences):
    num_rows = []

    def spy(logits, cu_rows, drafts, sampling):
        num_rows.append((len(logits), int(drafts.lengths.sum())))
        return sampler.verify(logits, cu_rows, drafts, sampling)

    llm = llm_with("truth", sequences, max_num_batched_tokens=32)
    verify_with(llm, spy)
    generate(llm, prompts[:1])
    num_chunks = -(-len(prompts[0]) // 32)
    assert num_rows[:num_chunks] == [(0, 0)] * (num_chunks - 1) + [(1, 0)]
    assert all(rows == drafts + 1 for rows, drafts in num_rows[num_chunks:])


def test_truth_is_accepted_whole(prompts, sequences):
    llm = llm_with("truth", sequences)
    generate(llm, prompts[:4])
    drafted, accepted = (counter(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    assert drafted == accepted
    decode_steps = -(-(NUM_TOKENS - 1) // (K + 1))
    assert counter(llm, "spec_decode_steps") == 4 * (1 + decode_steps)
    assert drafted == 4 * (NUM_TOKENS - 1 - decode_steps)


def test_garbage_costs_steps_and_changes_nothing_else(prompts, sequences):
    llm = llm_with("garbage", sequences)
    generate(llm, prompts[:2])
    assert counter(llm, "spec_decode_num_accepted_tokens") == 0
    assert counter(llm, "spec_decode_steps") == 2 * NUM_TOKENS


def test_counts_do_not_depend_on_the_batch(prompts, sequences):
    llm = llm_with("ragged", sequences)
    together = generate(llm, prompts[:4])
    for prompt, output in zip(prompts[:4], together, strict=True):
        (alone,) = generate(llm, [prompt])
        assert alone.outputs[0].spec_decode_metrics == output.outputs[0].spec_decode_metrics


def test_requests_that_arrive_while_others_run_equal_transformers(prompts, truth, sequences, reference_model):
    llm = llm_with("ragged", sequences, max_num_seqs=3)
    finished = {}
    for index, prompt in enumerate(prompts[:6]):
        llm.engine.add_request(prompt, GREEDY, f"r{index}")
        for each in llm.engine.step():
            if each.request.finish_reason is not None:
                finished[each.request.request_id] = each.request
    finished |= run(llm.engine)
    found = [finished[f"r{index}"].output_token_ids for index in range(6)]
    assert_same_tokens(found, truth[:6], prompts[:6], reference_model)
