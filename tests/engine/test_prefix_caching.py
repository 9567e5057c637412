"""Requests that begin alike compute that once: the text is what it is without, and only what is new is computed."""

from __future__ import annotations

import logging
from functools import cache

import pytest
import torch
from engine_helpers import GREEDY, checked_step, counter, make_llm, run, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import pool_of, proposer_of, served_target_of

from specdec import LLM, SamplingParams
from specdec.core.cache.block_pool import BlockPool, KnownBlocks
from specdec.core.request.request import Request
from specdec.core.runner.scheduler import Scheduler
from specdec.sdk import ConfigError

BLOCK = 16
DRAFTERS = {
    "plain": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "token_recycling": {"method": "token_recycling"},
    "medusa": {"model": "tiny/medusa", "num_speculative_tokens": 3},
    "eagle3": {"model": "tiny/eagle3"},
    "draft_model": {"method": "draft_model", "model": "tiny/draft"},
    "dflash": {"model": "tiny/dflash"},
    "layer_skip": {"method": "layer_skip", "proposer_config": {"exit_layer": 6}},
}
QUICK, FULL = ("plain", "ngram", "eagle3"), pytest.mark.full
WITH_DRAFT_KV = ("eagle3", "draft_model", "dflash")
SHORT = GREEDY.replace(max_tokens=8)


@cache
def engine_with(drafter, *, cached, num_kv_blocks=200):
    asked = DRAFTERS[drafter] and {"num_speculative_tokens": 3} | DRAFTERS[drafter]
    return LLM(
        "tiny",
        device="cpu",
        speculative_config=asked,
        enable_prefix_caching=cached,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=96,
        num_kv_blocks=num_kv_blocks,
    )


def text(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 900, (length,), generator=generator).tolist()


def prompt_of(pieces):
    return [token for seed, length in pieces for token in text(seed, length)]


def asked(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def all_tokens(outputs):
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


PIECES = st.tuples(st.integers(0, 2), st.sampled_from([5, BLOCK, 2 * BLOCK, 40]))
REQUESTS = st.fixed_dictionaries(
    {
        "pieces": st.lists(PIECES, min_size=1, max_size=3),
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 1.0]),
        "max_tokens": st.integers(1, 24),
        "namespace": st.sampled_from(["", "other"]),
    }
)


def params_of(request):
    names = ("n", "temperature", "max_tokens", "namespace")
    return SamplingParams(seed=1, ignore_eos=True, **{name: request[name] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [name if name in QUICK else pytest.param(name, marks=FULL) for name in DRAFTERS])
@given(batches=st.lists(st.lists(REQUESTS, min_size=1, max_size=3), min_size=1, max_size=3), scarce=st.booleans())
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_text_is_that_without_shared_blocks(drafter, batches, scarce):
    """Also where blocks are short, so that requests are preempted and what is known is forgotten."""
    blocks = 20 if scarce else 200
    plain, llm = engine_with("plain", cached=False), engine_with(drafter, cached=True, num_kv_blocks=blocks)
    for batch in batches:
        prompts = asked([prompt_of(request["pieces"]) for request in batch])
        params = [params_of(request) for request in batch]
        assert all_tokens(llm.generate(prompts, params)) == all_tokens(plain.generate(prompts, params))
        llm.engine.check_integrity()
    assert pool_of(llm).num_free == blocks


@pytest.mark.parametrize("drafter", QUICK)
def test_where_blocks_are_short_requests_are_preempted_and_prefixes_are_shared(drafter):
    """As in some of the runs above."""
    plain, llm = engine_with("plain", cached=False), engine_with(drafter, cached=True, num_kv_blocks=20)
    prompts, params = asked([prompt_of([(7, 40), (seed, 40)]) for seed in range(4)]), GREEDY.replace(max_tokens=40)
    before = [counter(llm, name) for name in ("num_preemptions", "prefix_cache_hits")]
    assert all_tokens(llm.generate(prompts, params)) == all_tokens(plain.generate(prompts, params))
    after = [counter(llm, name) for name in ("num_preemptions", "prefix_cache_hits")]
    assert all(later > sooner for sooner, later in zip(before, after, strict=True))


@pytest.mark.parametrize("drafter", WITH_DRAFT_KV)
def test_drafts_behind_a_shared_prefix_are_those_without(drafter):
    """Draft KV lies in the same blocks, and what depends on a block's next token is not taken for another's."""
    first = prompt_of([(0, 3 * BLOCK), (1, 12)])
    parts = [first, first, [*first[: 3 * BLOCK], *text(2, 12)], [*first, *text(3, 30)]]

    def drafts(cached):
        llm = make_llm_of(drafter, enable_prefix_caching=cached)
        steps = [[each.draft_token_ids for each in llm.stream(asked([part]), SHORT)] for part in parts]
        return steps, counter(llm, "prefix_cache_hits")

    warm, num_hits = drafts(True)
    assert warm == drafts(False)[0]
    assert num_hits >= 3 * 2 * BLOCK


def make_llm_of(drafter, **settings):
    asked = DRAFTERS[drafter] and {"num_speculative_tokens": 3} | DRAFTERS[drafter]
    return LLM("tiny", device="cpu", speculative_config=asked, max_model_len=512, max_num_seqs=8, **settings)


def steps_of(llm, prompts, params=SHORT):
    """Tokens computed by each step for each request, until all have ended."""
    names = [llm.engine.add_request({"prompt_token_ids": prompt}, params) for prompt in prompts]
    steps = []
    while llm.engine.has_unfinished_requests:
        steps.append({each.request.request_id: each.num_rows for each in checked_step(llm.engine)})
    return names, steps


def test_a_second_turn_computes_only_what_is_new():
    llm, first = make_llm(), text(0, 100)
    [reply] = tokens(llm.generate(asked([first]), SHORT))
    second = [*first, *reply, *text(1, 20)]
    [name], steps = steps_of(llm, [second])
    known = (len(first) + len(reply) - 1) // BLOCK * BLOCK  # the reply's newest token was never computed
    assert steps[0][name] == len(second) - known
    [output] = llm.generate(asked([second]), SHORT)
    assert output.num_cached_tokens == (len(second) - 1) // BLOCK * BLOCK


def test_one_of_several_with_a_long_prefix_computes_it_and_the_others_wait_a_step():
    llm, prefix = make_llm(), text(0, 10 * BLOCK)
    names, steps = steps_of(llm, [[*prefix, *text(seed, 5)] for seed in range(1, 9)])
    assert steps[0] == {names[0]: 10 * BLOCK + 5}
    assert [steps[1][name] for name in names] == [1, *[5] * 7]
    assert counter(llm, "prefix_cache_queries") == 8 * (10 * BLOCK + 5)
    assert counter(llm, "prefix_cache_hits") == 7 * 10 * BLOCK


def test_nobody_waits_for_a_prefix_that_is_less_than_half():
    llm, prefix = make_llm(), text(0, 2 * BLOCK)
    names, steps = steps_of(llm, [[*prefix, *text(seed, 80)] for seed in (1, 2)])
    assert steps[0] == dict.fromkeys(names, 2 * BLOCK + 80)


def test_outputs_of_one_prompt_compute_it_once():
    llm, prompt = make_llm(), text(0, 5 * BLOCK + 3)
    [output] = llm.generate(asked([prompt]), SHORT.replace(n=4))
    assert counter(llm, "prefix_cache_hits") == 3 * 5 * BLOCK
    assert output.num_cached_tokens == 0, "of the first, for whom nothing was there"
    assert len({each.token_ids for each in output.outputs}) == 1


def test_the_last_token_of_a_prompt_is_always_computed():
    llm, prompt = make_llm(), text(0, 3 * BLOCK)
    cold, warm = (llm.generate(asked([prompt]), SHORT)[0] for _ in range(2))
    assert warm.num_cached_tokens == 2 * BLOCK
    assert tokens([warm]) == tokens([cold])


def test_namespaces_share_no_block():
    llm, prompt = make_llm(), text(0, 4 * BLOCK + 1)
    found = [llm.generate(asked([prompt]), SHORT.replace(namespace=each))[0].num_cached_tokens for each in "aab"]
    assert found == [0, 4 * BLOCK, 0]


def test_a_preempted_request_goes_on_behind_what_is_still_known():
    scheduler = Scheduler(BlockPool(6, 4, known=KnownBlocks(4)), 2, 100)
    for name, length in (("a", 9), ("b", 7)):
        prompt = [ord(name)] * length
        scheduler.add(Request(name, prompt, SamplingParams(), 0, 30, frozenset(), None))
    starts = []
    for _ in range(12):
        plan = scheduler.schedule(lambda request: 0)
        starts += [(share.request.request_id, share.start) for share in plan.shares if share.num_tokens > 1]
        for share in plan.shares:
            share.request.commit([0])
            share.request.num_computed_tokens = len(share.request.token_ids) - 1
            if share.request.request_id == "a" and len(share.request.token_ids) > 13:
                share.request.abort()
                scheduler.finish(share.request)
        scheduler.check_integrity()
    assert starts[:2] == [("a", 0), ("b", 0)]
    assert starts[2:] == [("b", 8)], "of its three blocks the one that was not full was taken"


def test_an_aborted_request_leaves_what_it_computed():
    llm, prompt = make_llm(), text(0, 6 * BLOCK + 1)
    name = llm.engine.add_request({"prompt_token_ids": prompt}, SHORT)
    checked_step(llm.engine)
    llm.abort(name)
    llm.engine.check_integrity()
    [output] = llm.generate(asked([prompt]), SHORT)
    assert output.num_cached_tokens == 6 * BLOCK


def test_an_interrupted_step_leaves_nothing_that_was_not_computed(monkeypatch):
    llm, prompt = make_llm(), text(0, 6 * BLOCK + 1)
    expected = tokens(make_llm(enable_prefix_caching=False).generate(asked([prompt]), SHORT))

    def interrupted(inputs):
        raise KeyboardInterrupt

    llm.engine.add_request({"prompt_token_ids": prompt}, SHORT, "first")
    with monkeypatch.context() as patch:
        patch.setattr(served_target_of(llm), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    llm.abort("first")
    [output] = llm.generate(asked([prompt]), SHORT)
    assert output.num_cached_tokens == 0
    assert tokens([output]) == expected


@pytest.mark.parametrize(("num_failures", "num_found"), [(1, 0), (0, 4 * BLOCK)])
def test_blocks_of_a_step_that_the_proposer_failed_to_see_are_not_found(num_failures, num_found):
    """Its draft KV may have gaps there."""
    faults = {"where": "observe", "times": num_failures}
    llm = make_llm("Faulty", options=faults, speculative={"on_proposer_error": "skip_step"})
    for name in ("first", "second"):
        llm.engine.add_request({"prompt_token_ids": text(0, 4 * BLOCK + 1)}, SHORT, name)
        checked_step(llm.engine)
    assert llm.engine.get_request("second").num_cached_tokens == num_found


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "forced"])
def test_text_of_a_form_is_that_without_shared_blocks(drafter):
    """A request that goes on behind shared blocks after a preemption stands in its grammar where it stood."""
    form = {"json": {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 12, "maxItems": 20}}
    params = SHORT.replace(max_tokens=60, structured_outputs=form)
    prompts = asked([prompt_of([(0, 3 * BLOCK), (seed, 10)]) for seed in range(1, 5)])

    def served(**settings):
        llm = make_llm(drafter, max_model_len=256, max_num_seqs=4, **settings)
        return llm, all_tokens(llm.generate(prompts, params))

    llm, found = served(num_kv_blocks=16)
    assert found == served(enable_prefix_caching=False)[1]
    assert counter(llm, "num_preemptions") > 0
    assert counter(llm, "prefix_cache_hits") > 0


@pytest.mark.full
def test_a_drafter_elsewhere_drafts_behind_a_shared_prefix_too():
    """It has the whole text, and blocks of its own."""
    drafter = DRAFTERS["draft_model"] | {"num_speculative_tokens": 3}
    first = text(0, 3 * BLOCK + 1)
    parts = [first, [*first[:-1], *text(1, 20)]]

    def drafts(**isolation):
        with LLM("tiny", speculative_config=drafter | isolation, max_model_len=256) as llm:
            steps = [[each.draft_token_ids for each in llm.stream(asked([part]), SHORT)] for part in parts]
            return steps, counter(llm, "prefix_cache_hits")

    found = drafts(isolation="process")
    assert found == drafts()
    assert found[1] == 3 * BLOCK


@pytest.mark.parametrize("drafter", ["plain", "eagle3"])
def test_blocks_of_the_last_step_are_found_where_no_draft_kv_is_missing_in_them(drafter):
    """A proposer is not shown the step in which a request ends."""
    llm, prompt = make_llm_of(drafter), text(0, 4 * BLOCK + 1)
    llm.generate(asked([prompt]), SHORT.replace(max_tokens=1))
    [output] = llm.generate(asked([prompt]), SHORT.replace(max_tokens=1))
    assert output.num_cached_tokens == (4 * BLOCK if drafter == "plain" else 0)


def test_reset_prefix_cache_forgets_all_but_what_runs():
    llm, prompt = make_llm(), text(0, 4 * BLOCK + 1)
    llm.generate(asked([prompt]), SHORT)
    llm.engine.add_request({"prompt_token_ids": [*prompt, 5]}, SHORT, "runs")
    checked_step(llm.engine)
    llm.reset_prefix_cache()
    assert run(llm.engine)["runs"].num_cached_tokens == 4 * BLOCK
    [output] = llm.generate(asked([prompt]), SHORT)
    assert output.num_cached_tokens == 0


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("drafter", ["plain", "eagle3"])
def test_what_runs_leaves_nothing_that_was_computed_before_it_was_forgotten(drafter, num_steps):
    """After one step the blocks of a prompt are computed, and nobody has learned of them."""
    llm, prompt = make_llm_of(drafter), text(0, 4 * BLOCK + 1)
    llm.engine.add_request({"prompt_token_ids": prompt}, SHORT, "runs")
    for _ in range(num_steps):
        checked_step(llm.engine)
    llm.reset_prefix_cache() if drafter == "plain" else llm.update_proposer_weights({})
    run(llm.engine)
    [output] = llm.generate(asked([prompt]), SHORT)
    assert output.num_cached_tokens == 0


def test_new_weights_of_a_drafter_leave_no_draft_kv_of_the_old_ones():
    llm, prompt = make_llm_of("eagle3"), text(0, 4 * BLOCK + 1)
    llm.generate(asked([prompt]), SHORT)
    llm.update_proposer_weights({})
    [output] = llm.generate(asked([prompt]), SHORT)
    assert output.num_cached_tokens == 0


# -- where prefixes are not shared -----------------------------------------------------------------------------------


def test_a_proposer_that_has_to_see_whole_prompts_does(caplog):
    prompt = text(0, 4 * BLOCK)
    with caplog.at_level(logging.INFO, logger="specdec"):
        llm = make_llm("SeesAll")
    assert "Needs.whole_prompt" in caplog.text
    outputs = [llm.generate(asked([prompt]), SHORT)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [None, None]
    assert proposer_of(llm).shown.count(0) == 2
    assert not llm.engine.prefix_caching.enabled


def test_states_lie_in_no_block(caplog):
    with caplog.at_level(logging.INFO, logger="specdec"):
        llm = make_llm(model="tiny/hybrid")
    assert "keep a state" in caplog.text
    assert "keep a state" in llm.engine.prefix_caching.because
    assert pool_of(llm).known is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"model": "tiny/hybrid"}, "keep a state"), ({"proposer": "SeesAll"}, "Needs.whole_prompt")],
    ids=["states", "whole prompts"],
)
def test_what_is_asked_for_in_vain_is_refused(settings, why):
    with pytest.raises(ConfigError, match=why) as caught:
        make_llm(enable_prefix_caching=True, **settings)
    assert caught.value.code == "SD-E338"


@pytest.mark.parametrize("value", [1, "true", "auto"])
def test_bad_settings_are_refused(value):
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        make_llm(enable_prefix_caching=value)


def test_it_can_be_left_out():
    llm, prompt = make_llm(enable_prefix_caching=False), text(0, 4 * BLOCK + 1)
    outputs = [llm.generate(asked([prompt]), SHORT)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [None, None]
    assert counter(llm, "prefix_cache_queries") == 0
    assert pool_of(llm).known is None
