"""Nothing is lost, leaked or starved: random arrivals, aborts and preemptions, with the books checked at each step."""

from __future__ import annotations

import gc
import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import GREEDY, assert_same_tokens, checked_step, counter, make_llm, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inside import pool_of

from specdec import SamplingParams
from specdec.core.cache.block_pool import BlockPool, KnownBlocks
from specdec.core.cache.row_table import RowTable
from specdec.core.cache.state_store import StateLayout, StateStore, StateTensor
from specdec.core.request.request import Committed, Request, Scheduled
from specdec.core.runner.request_progress import draft_budgets
from specdec.core.runner.scheduler import Scheduler
from specdec.sdk import Needs
from specdec.sdk.errors import IntegrityError

BLOCK_SIZE = 4
NUM_BLOCKS = 12
MAX_NUM_SEQS = 4
TOKEN_BUDGET = 9


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the runner: whatever is scheduled is computed, a random part of the drafts is accepted."""

    @initialize(lookahead=st.sampled_from([0, 3]))
    def start(self, lookahead):
        self.lookahead = lookahead
        self.scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), MAX_NUM_SEQS, TOKEN_BUDGET, lookahead)
        self.alive: list[Request] = []  # in order of arrival
        self.started: list[Request] = []
        self.num_added = 0

    @rule(num_prompt_tokens=st.integers(1, 20), num_output_tokens=st.integers(1, 20))
    def add(self, num_prompt_tokens, num_output_tokens):
        capacity = NUM_BLOCKS * BLOCK_SIZE - self.lookahead
        request = Request(
            request_id=str(self.num_added),
            prompt_token_ids=[0] * num_prompt_tokens,
            params=SamplingParams(max_tokens=num_output_tokens),
            seed=0,
            max_total_tokens=min(num_prompt_tokens + num_output_tokens, capacity),
            end_token_ids=frozenset(),
            detokenizer=None,
        )
        self.num_added += 1
        self.alive.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.alive))
        request.abort()
        self.scheduler.finish(request)
        self.alive.remove(request)
        assert not request.blocks

    @precondition(lambda self: self.alive)
    @rule(choice=st.randoms(use_true_random=False))
    def step(self, choice):
        self.advance(choice)

    def advance(self, choice):
        drafts = {
            id(request): choice.randint(0, min(5, request.max_total_tokens - len(request.token_ids) - 1))
            for request in self.scheduler.running
        }
        plan = self.scheduler.schedule(lambda request: drafts[id(request)])
        self.check_plan(plan, drafts)
        for share in plan.shares:
            self.compute(share, choice)

    def check_plan(self, plan, drafts):
        assert plan.shares, "something always advances"
        assert plan.shares[0].request is self.alive[0], "the oldest request always advances"
        assert sum(share.num_tokens + share.num_draft_tokens for share in plan.shares) <= TOKEN_BUDGET
        for request in plan.preempted:
            assert request in self.scheduler.waiting
            assert not request.blocks
            assert request.num_computed_tokens == 0
        for share in plan.shares:
            request = share.request
            assert request not in plan.preempted
            assert share.start == request.num_computed_tokens
            assert 1 <= share.num_tokens <= request.num_uncomputed_tokens
            assert share.samples == (share.num_tokens == request.num_uncomputed_tokens)
            assert share.num_draft_tokens <= drafts.get(id(request), 0) * share.samples
            needed = share.start + share.num_tokens + share.num_draft_tokens
            needed = max(needed, min(needed + self.lookahead, request.max_total_tokens))
            assert len(request.blocks) * BLOCK_SIZE >= needed

    def compute(self, share, choice):
        request = share.request
        if request not in self.started:
            self.started.append(request)
        if not share.samples:
            request.num_computed_tokens += share.num_tokens
            return
        request.commit([0] * (choice.randint(0, share.num_draft_tokens) + 1))
        request.num_computed_tokens = len(request.token_ids) - 1
        if request.finish_reason is not None:
            self.scheduler.finish(request)
            self.alive.remove(request)

    @invariant()
    def books_balance(self):
        self.scheduler.check_integrity()

    @invariant()
    def queues_are_in_order_of_arrival(self):
        assert [*self.scheduler.running, *self.scheduler.waiting] == self.alive

    @invariant()
    def requests_start_in_order_of_arrival(self):
        numbers = [int(request.request_id) for request in self.started]
        assert numbers == sorted(numbers)

    def teardown(self):
        choice = random.Random(0)
        for _ in range(10_000):
            if not self.alive:
                break
            self.advance(choice)
        assert not self.alive
        assert not [*self.scheduler.waiting, *self.scheduler.running]
        assert self.scheduler.pool.num_free == NUM_BLOCKS
        self.scheduler.check_integrity()


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase


def advance(scheduler, drafts):
    """One step in which every draft is rejected; `drafts` by request id."""
    plan = scheduler.schedule(lambda request: drafts.get(request.request_id, 0))
    for share in plan.shares:
        share.request.commit([0])
        share.request.num_computed_tokens = len(share.request.token_ids) - 1
    return plan


def test_a_preempted_request_waits_a_step_though_its_own_blocks_would_do():
    scheduler = Scheduler(BlockPool(5, BLOCK_SIZE), 2, 100)
    for name, num_prompt_tokens in {"a": 7, "b": 2}.items():
        scheduler.add(Request(name, [0] * num_prompt_tokens, SamplingParams(), 0, 20, frozenset(), None))
    advance(scheduler, {})
    advance(scheduler, {"b": 7})  # two of its three blocks are to spare once its drafts are rejected
    plan = advance(scheduler, {})
    assert [request.request_id for request in plan.preempted] == ["b"]
    assert [share.request.request_id for share in plan.shares] == ["a"]
    assert scheduler.pool.can_extend([], len(scheduler.waiting[0].token_ids))


def test_where_blocks_are_short_a_draft_loses_its_end_only():
    """Whether a token is verified may not depend on how many more were drafted after it."""
    scheduler = Scheduler(BlockPool(2, BLOCK_SIZE), 2, 100)
    scheduler.add(Request("a", [0] * (BLOCK_SIZE + 1), SamplingParams(), 0, 40, frozenset(), None))
    advance(scheduler, {})
    (share,) = advance(scheduler, {"a": BLOCK_SIZE}).shares
    assert share.num_draft_tokens == 2 * BLOCK_SIZE - len(share.request.token_ids) + 1


@given(
    num_blocks=st.integers(1, 24),
    region_size=st.none() | st.integers(1, 30),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=40),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_blocks_are_owned_once_whatever_happens(num_blocks, region_size, moves):
    pool, owned = BlockPool(num_blocks, BLOCK_SIZE, region_size), [[], [], [], []]
    for who, num_tokens, release in moves:
        if release:
            pool.release(owned[who])
        elif pool.can_extend(owned[who], num_tokens):
            before = list(owned[who])
            pool.extend(owned[who], num_tokens)
            assert owned[who][: len(before)] == before, "blocks that hold KV stay where they are"
            assert len(owned[who]) == max(len(before), -(-num_tokens // pool.block_size))
        pool.check_integrity(owned)
    for blocks in owned:
        pool.release(blocks)
    assert pool.num_free == num_blocks


def is_adjacent(blocks):
    return blocks == list(range(blocks[0], blocks[0] + len(blocks)))


@pytest.mark.parametrize("num_requests", [1, 2, 4, 8])
def test_requests_that_grow_together_keep_adjacent_blocks(num_requests):
    pool = BlockPool(64, BLOCK_SIZE)
    owned = [[] for _ in range(num_requests)]
    for num_tokens in range(1, 64 // num_requests * BLOCK_SIZE // 2 + 1):
        for blocks in owned:
            pool.extend(blocks, num_tokens)
    assert all(is_adjacent(blocks) for blocks in owned)


def test_a_lone_request_can_fill_the_pool_adjacently():
    pool, blocks = BlockPool(8, BLOCK_SIZE), []
    for num_tokens in range(1, 8 * BLOCK_SIZE + 1):
        pool.extend(blocks, num_tokens)
    assert blocks == list(range(8))


def test_runs_start_equally_spaced_while_there_are_free_regions():
    pool, owned = BlockPool(13, BLOCK_SIZE, region_size=3), [[] for _ in range(4)]
    for blocks in owned:
        pool.extend(blocks, 1)
    assert [blocks[0] for blocks in owned] == [0, 3, 6, 9]
    pool.release(owned[1])
    for blocks in owned:
        pool.extend(blocks, 3 * BLOCK_SIZE)
    assert owned == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_a_pool_without_a_free_region_uses_what_gaps_there_are():
    pool, owned = BlockPool(5, BLOCK_SIZE, region_size=4), [[] for _ in range(5)]
    for blocks in owned:
        pool.extend(blocks, 1)
    assert pool.num_free == 0
    pool.check_integrity(owned)


def test_every_block_is_found_however_scattered():
    pool, owned = BlockPool(9, BLOCK_SIZE), [[] for _ in range(9)]
    for blocks in owned:
        pool.extend(blocks, 1)
    for blocks in owned[::2]:
        pool.release(blocks)
    scattered = []
    pool.extend(scattered, 5 * BLOCK_SIZE)
    assert pool.num_free == 0
    pool.check_integrity([scattered, *owned[1::2]])


@pytest.mark.parametrize("owned", [[[0]], [[0, 1], [1]], [[0, 1, 2]], []], ids=["lost", "twice", "free", "all lost"])
def test_inconsistent_books_are_noticed(owned):
    pool = BlockPool(4, BLOCK_SIZE)
    pool.extend([], 2 * BLOCK_SIZE)
    with pytest.raises(IntegrityError):
        pool.check_integrity(owned)


def random_day(seed, llm, prompts, num_requests):
    """Random arrivals and aborts through the engine. Returns finished requests and the aborted ones' ids."""
    choice, engine, finished, aborted, added = random.Random(seed), llm.engine, {}, set(), 0
    while added < num_requests or engine.has_unfinished_requests:
        if added < num_requests and choice.random() < 0.3:
            engine.add_request(prompts[added % len(prompts)], GREEDY, f"{added}")
            added += 1
        if choice.random() < 0.03 and added:
            victim = str(choice.randrange(added))
            if engine.abort(victim) is not None:
                aborted.add(victim)
        if engine.has_unfinished_requests:
            committed = checked_step(engine)
            finished |= {each.request.request_id: each.request for each in committed if each.request.finish_reason}
    return finished, aborted


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 8))])
@pytest.mark.parametrize("proposer", ["ngram", "Scripted"])
def test_a_random_day_gives_everybody_their_tokens(seed, proposer, prompts, truth, sequences, reference_model):
    options = {"sequences": sequences, "wrong_every": 4, "ragged": True} if proposer == "Scripted" else {}
    llm = make_llm(proposer, options=options, max_num_seqs=4, num_kv_blocks=18, max_num_batched_tokens=50)
    finished, aborted = random_day(seed, llm, prompts, num_requests=10)
    assert finished.keys() | aborted == {str(index) for index in range(10)}
    assert finished.keys().isdisjoint(aborted)
    names = sorted(finished, key=int)
    found = [finished[name].output_token_ids for name in names]
    places = [int(name) % len(prompts) for name in names]
    assert_same_tokens(found, [truth[i] for i in places], [prompts[i] for i in places], reference_model)
    assert counter(llm, "num_preemptions") > 0
    assert pool_of(llm).num_free == 18


def test_requests_are_served_first_come_first_served(prompts):
    llm = make_llm(max_num_seqs=1)
    for index in range(4):
        llm.engine.add_request(prompts[index], GREEDY.replace(max_tokens=4), str(index))
    assert list(run(llm.engine)) == ["0", "1", "2", "3"]


def test_an_old_request_finishes_though_new_ones_never_stop_coming(prompts):
    llm = make_llm(max_num_seqs=4, num_kv_blocks=16)
    llm.engine.add_request(prompts[0], GREEDY.replace(max_tokens=30), "old")
    for index in range(30):
        llm.engine.add_request(prompts[1], GREEDY, f"new{index}")
        finished = [each.request.request_id for each in llm.engine.step() if each.request.finish_reason]
        if "old" in finished:
            assert index == 29, "one token a step, from the first step on"
            return
    raise AssertionError("the oldest request was held up")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "distribution", "num_requests"),
    [
        ("ngram", "greedy", 300),
        pytest.param("ngram", "greedy", 1000, marks=pytest.mark.full),
        ("Forgetful", "probabilistic", 200),
        (None, None, 200),
    ],
    ids=["ngram", "ngram for long", "distributions", "plain"],
)
def test_served_requests_leave_nothing_behind(proposer, distribution, num_requests):
    llm = make_llm(proposer, k=2, speculative={"draft_sample_method": distribution})
    serve(llm, 100)
    before = num_objects_and_entries()
    serve(llm, num_requests)
    grown = [after - earlier for after, earlier in zip(num_objects_and_entries(), before, strict=True)]
    assert max(grown) < 100, grown
    assert pool_of(llm).num_free == pool_of(llm).num_blocks
    llm.engine.check_integrity()


def serve(llm, count):
    params = SamplingParams(temperature=0.9, max_tokens=3, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5, 6, 7, number % 1000, 5, 6]} for number in range(count)], params)


def num_objects_and_entries():
    """How many containers there are, and how much is in the growing kinds: a set of names counts by its names."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(len(each) for each in objects if type(each) in (dict, list, set, deque))


# -- what a budget is for ------------------------------------------------------------------------------------------


def request_of(name, num_prompt_tokens=1, max_total_tokens=12):
    return Request(name, [0] * num_prompt_tokens, SamplingParams(), 0, max_total_tokens, frozenset(), None)


def decoding(scheduler, names):
    """Requests that have one token of output each, and none to compute but that."""
    for name in names:
        scheduler.add(request_of(name))
    requests = [share.request for share in scheduler.schedule(lambda request: 0).shares]
    for request in requests:
        request.commit([1])
        request.num_computed_tokens = 1
    return requests


def test_drafts_leave_room_for_the_newest_token_of_those_behind_and_take_all_other():
    scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), MAX_NUM_SEQS, 8)
    decoding(scheduler, "abc")
    assert [share.num_draft_tokens for share in scheduler.schedule(lambda request: 4).shares] == [4, 1, 0]


def test_the_last_token_of_a_budget_is_used():
    scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), MAX_NUM_SEQS, 1)
    scheduler.add(request_of("a", num_prompt_tokens=3))
    assert [share.num_tokens for share in scheduler.schedule(lambda request: 0).shares] == [1]


def test_only_a_request_whose_state_was_left_half_advanced_is_computed_anew():
    layout = StateLayout((StateTensor("recurrent", 0, (2,), torch.float32),), 5, torch.float32)
    states = StateStore([layout], MAX_NUM_SEQS, 3, torch.device("cpu"))
    scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK_SIZE), MAX_NUM_SEQS, 8, states=states)
    requests = decoding(scheduler, "abc")
    shares = [Scheduled(each, 0, 1, 0, samples=True, first_token=at) for at, each in enumerate(requests)]
    with states.passing(states.plan(shares)):
        pass
    again = Scheduled(requests[1], 1, 1, 0, samples=True)
    with pytest.raises(KeyboardInterrupt), states.passing(states.plan([again])):
        raise KeyboardInterrupt
    plan = scheduler.schedule(lambda request: 0)
    assert plan.preempted == [requests[1]]
    assert [share.request for share in plan.shares] == [requests[0], requests[2]]


def test_a_row_has_a_new_generation_for_each_that_sits_there():
    rows, request = RowTable(1, BlockPool(NUM_BLOCKS, BLOCK_SIZE)), request_of("a")
    found = []
    for _ in range(3):
        rows.seat(request)
        found.append(request.generation)
        rows.unseat(request)
    assert found == [1, 2, 3], "of those that nobody has there is none below"


@pytest.mark.parametrize(("max_total_tokens", "most", "expected"), [(12, 5, 5), (12, 20, 9), (3, 5, 0)])
def test_drafts_are_asked_for_up_to_the_token_that_ends_a_text(max_total_tokens, most, expected):
    request = request_of("a", max_total_tokens=max_total_tokens)
    request.commit([1])
    host = SimpleNamespace(needs=Needs(), wants_drafts_for=lambda request_id: True)
    committed = Committed.now(Scheduled(request, 0, 1, 0, samples=True), [], 0, [1])
    assert draft_budgets([committed], host, most) == [expected]


@pytest.mark.parametrize(
    ("params", "output_ids", "fewest"),
    [
        ({}, [], 1),
        ({}, [1], 6),
        ({"speculative": False}, [1], 1),
        ({"num_speculative_tokens": 0}, [1], 1),
    ],
    ids=["in the middle of its prompt", "too few for a draft", "not speculative", "none wanted"],
)
def test_no_drafts_are_asked_for(params, output_ids, fewest):
    request = request_of("a")
    request.params = SamplingParams(**params)
    request.commit(output_ids)
    host = SimpleNamespace(needs=Needs(min_draft_tokens=fewest), wants_drafts_for=lambda request_id: True)
    committed = Committed.now(Scheduled(request, 0, 1, 0, samples=bool(output_ids)), [], 0, output_ids)
    assert draft_budgets([committed], host, 5) == [0]


def sharing(num_batched_tokens):
    """A scheduler whose pool knows the blocks of texts."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, known=KnownBlocks(BLOCK_SIZE, 0))
    return Scheduler(pool, MAX_NUM_SEQS, num_batched_tokens)


def planned(scheduler):
    """Names and numbers of tokens of the next step, which is computed."""
    shares = scheduler.schedule(lambda request: 0).shares
    for share in shares:
        share.request.num_computed_tokens += share.num_tokens
    return [(share.request.request_id, share.num_tokens) for share in shares]


def test_a_request_waits_for_the_blocks_that_another_one_computes_and_begins_behind_them():
    scheduler = sharing(64)
    for name in "ab":
        scheduler.add(request_of(name, num_prompt_tokens=13, max_total_tokens=20))
    assert planned(scheduler) == [("a", 13)]
    scheduler.running[0].commit([1])
    assert planned(scheduler) == [("a", 1), ("b", 1)]


def test_it_does_not_wait_for_blocks_that_are_computed_but_not_to_be_found():
    scheduler = sharing(8)
    scheduler.add(request_of("a", num_prompt_tokens=12, max_total_tokens=20))
    assert planned(scheduler) == [("a", 8)]
    scheduler.running[0].shares_blocks = False
    scheduler.add(request_of("b", num_prompt_tokens=12, max_total_tokens=20))
    assert planned(scheduler) == [("a", 4), ("b", 4)]
