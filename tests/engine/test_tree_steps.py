"""Steps that verify trees: the text of plain decoding to the bit, whatever the trees are and whatever else happens."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, counter, make_llm, run, tokens
from engine_proposers import WatchingBushes
from inside import addressing_of, cache_of, listen, scheduler_of

from specdec import SamplingParams
from specdec.core.proposing.tree_views import kept_first, kept_places, rejected_places
from specdec.core.request.request import Committed
from specdec.core.request.verified_tree import VerifiedTree
from specdec.sdk import Refusal, hookimpl

NUM_TOKENS = 40
PROMPTS = [[5, 6, 7, 8, 9], [100, 7, 3], [11] * 20, [2, 3]]
VARIANTS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.7, "logit_bias": {7: 2.0}, "min_tokens": 5, "logprobs": 1},
)


def params(greedy: bool) -> list[SamplingParams]:
    if greedy:
        return [GREEDY.replace(max_tokens=NUM_TOKENS)] * len(PROMPTS)
    shared = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return [SamplingParams(**each, **shared, seed=b) for b, each in enumerate(VARIANTS)]


def generate(llm, greedy):
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params(greedy))


@pytest.fixture(scope="module")
def plain():
    llm = make_llm()
    return {greedy: generate(llm, greedy) for greedy in (True, False)}


@pytest.fixture(scope="module")
def sequences(plain):
    return {
        greedy: [[*prompt, *found] for prompt, found in zip(PROMPTS, tokens(plain[greedy]), strict=True)]
        for greedy in plain
    }


def with_trees(sequences, *, k=12, name="Bushes", **settings):
    return make_llm(name, k=k, options={"sequences": sequences}, **settings)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_random_trees_give_the_text_and_the_logprobs_of_plain_decoding(plain, sequences, greedy):
    llm = with_trees(sequences[greedy])
    found = generate(llm, greedy)
    assert tokens(found) == tokens(plain[greedy])
    assert [each.outputs[0].logprobs for each in found] == [each.outputs[0].logprobs for each in plain[greedy]]
    assert counter(llm, "spec_decode_num_accepted_tokens") > 30


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 2},
        {"max_num_batched_tokens": 9},
        {"num_kv_blocks": 9, "block_size": 16, "max_model_len": 128},
        {"max_model_len": 48},
        {"cpu_kernels": "torch"},
        {"speculative": {"rejection_sample_method": "block"}},
    ],
    ids=["small blocks", "cut by the budget", "preemption", "near the end", "without kernels", "block"],
)
def test_trees_of_any_shape_survive_what_happens_to_a_batch(settings, request, sequences, plain):
    expected = plain[True]
    if ("max_model_len" in settings and settings["max_model_len"] == 48) or "cpu_kernels" in settings:
        own = {name: value for name, value in settings.items() if name != "speculative"}
        expected = generate(make_llm(**own), True)
    found = generate(with_trees(sequences[True], **settings), True)
    assert tokens(found) == tokens(expected)


def test_the_cache_after_a_path_is_the_cache_of_plain_decoding(sequences):
    kept = []
    for llm in (make_llm(), with_trees(sequences[True])):
        engine = llm.engine
        engine.add_request(PROMPTS[0], GREEDY.replace(max_tokens=NUM_TOKENS))
        request = None
        while engine.has_unfinished_requests:
            for each in engine.step():
                request = each.request
            if request is not None and len(request.token_ids) >= len(PROMPTS[0]) + 30:
                break
        cache = cache_of(llm)
        slots = addressing_of(llm).slots_of_row(cache, request.row, len(PROMPTS[0]) + 29)
        kept.append([stored[slots].clone() for stored in (*cache.keys, *cache.values)])
    for ours, theirs in zip(*kept, strict=True):
        assert torch.equal(ours, theirs)


def test_a_proposer_sees_the_path_as_a_chain_of_kept_rows(sequences, plain):
    WatchingBushes.seen.clear()
    WatchingBushes.hidden.clear()
    llm = with_trees(sequences[True], name="WatchingBushes")
    assert tokens(generate(llm, True)) == tokens(plain[True])
    assert len(WatchingBushes.seen) > 5, "no path left the first chain"
    for path, positions, length in WatchingBushes.seen:
        assert positions == list(range(length - len(path) - 2, length - 1))
    states = dict(WatchingBushes.hidden)
    WatchingBushes.hidden.clear()
    generate(with_trees(sequences[True], name="WatchingBushes", k=1), True)
    shared = states.keys() & WatchingBushes.hidden.keys()
    assert len(shared) > 100
    assert all(torch.equal(states[key], WatchingBushes.hidden[key]) for key in shared)


def test_where_tokens_are_short_trees_lose_their_last_nodes_and_every_request_advances(sequences, plain):
    engine = with_trees(sequences[True], max_num_batched_tokens=30).engine
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY.replace(max_tokens=NUM_TOKENS))
    texts, sizes = {}, []
    while engine.has_unfinished_requests:
        running = {each.request_id for each in scheduler_of(engine).running}
        committed = engine.step()
        assert running <= {each.request.request_id for each in committed}, "a request waited for another one's drafts"
        assert sum(each.num_rows for each in committed) <= 30
        sizes += [[each.num_drafted for each in committed]] if len(committed) == len(PROMPTS) else []
        texts |= {each.request.request_id: each.request.output_token_ids for each in committed}
    assert [texts[name] for name in sorted(texts)] == tokens(plain[True])
    assert any(sum(each) == 30 - len(PROMPTS) for each in sizes), "no step was full"
    assert any(min(each) == 0 < max(each) for each in sizes)


def test_a_stop_token_inside_a_path_ends_the_text_there(plain, sequences):
    texts = enumerate(tokens(plain[True]))
    number, text, stop = next(
        (b, text, token) for b, text in texts for i, token in enumerate(text) if i > 5 and token not in text[:i]
    )
    asked = GREEDY.replace(max_tokens=NUM_TOKENS, stop_token_ids=[stop])
    llm = with_trees(sequences[True])
    (found,) = llm.generate([{"prompt_token_ids": PROMPTS[number]}], asked)
    assert list(found.outputs[0].token_ids) == text[: text.index(stop) + 1]


def test_trees_and_chains_and_plain_requests_share_a_step(plain, sequences):
    llm = with_trees(sequences[True])
    asked = [
        each.replace(num_speculative_tokens=limit) for each, limit in zip(params(True), (12, 1, 0, 5), strict=True)
    ]
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked)
    assert tokens(found) == tokens(plain[True])


def test_a_lossy_rule_refuses_trees_by_name():
    with pytest.raises(Refusal, match="a lossy rule verifies chains alone"):
        make_llm("Bushes", speculative={"rejection_sample_method": "typical"})


def test_every_step_leaves_the_books_in_order(sequences):
    engine = with_trees(sequences[True], block_size=4).engine
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY.replace(max_tokens=NUM_TOKENS))
    assert len(run(engine)) == len(PROMPTS)


def test_listeners_are_shown_the_rows_of_the_path(sequences, plain):
    class Listener:
        def __init__(self):
            self.rows, self.branched = [], 0

        @hookimpl
        def on_verified(self, step):
            for each in step.requests:
                assert step.logits[each.logits_rows].argmax(-1).tolist() == list(each.token_ids)
                assert list(each.draft_token_ids[: each.num_accepted]) == list(each.token_ids[: each.num_accepted])
                rows = each.logits_rows
                self.branched += rows != list(range(rows[0], rows[0] + len(rows)))

    llm, listener = with_trees(sequences[True]), Listener()
    listen(llm, listener)
    assert tokens(generate(llm, True)) == tokens(plain[True])
    assert listener.branched > 5


def test_acceptance_is_counted_by_depth(sequences):
    llm = with_trees(sequences[True])
    found = [each.outputs[0].spec_decode_metrics for each in generate(llm, True)]
    for each in found:
        by_depth = each["acceptance_per_position"]
        assert len(by_depth) <= 12
        assert sum(by_depth) == pytest.approx(each["mean_acceptance_length"] - 1)


TREE = VerifiedTree(nodes=[1, 3], parents=[-1, -1, 0, 1, 1])
ROW = Committed(None, 0, 1, 10, 6, 20, 3, [0] * 5, 2, [7, 8, 9], 24, TREE)  # one committed token and five nodes


@pytest.mark.parametrize(("num_kept", "places"), [(3, [10, 12, 14]), (2, [10, 12]), (1, [10])])
def test_of_an_accepted_path_those_places_are_kept_that_the_text_kept(num_kept, places):
    each = ROW._replace(num_kept=num_kept)
    assert kept_places([each]) == places
    assert kept_first([each]) == [*places, *(place for place in range(10, 16) if place not in places)]


def test_rejected_nodes_have_their_places_and_the_positions_of_their_depths():
    assert rejected_places(ROW) == ([11, 13, 15], [21, 22, 22])
    chain = ROW._replace(tree=None)
    assert [list(each) for each in rejected_places(chain)] == [[13, 14, 15], [23, 24, 25]]
