"""Blocks that are found again hold what is looked for, whatever is shared, forgotten and taken in between."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.core.cache.block_pool import BlockPool, KnownBlocks

SIZE = 4
DRAFT_KV = {"of tokens": 0, "of pairs": 1}  # how many tokens behind a block its entries depend on
TEXTS = st.lists(st.integers(0, 1), min_size=2, max_size=40)
NAMESPACES = st.sampled_from(["", "other"])


class User:
    """A text, how much of it is computed, and the blocks that hold this."""

    def __init__(self, namespace, text):
        self.namespace, self.text = namespace, text
        self.blocks, self.num_computed = [], 0


class PoolMachine(RuleBasedStateMachine):
    """Writes down what each block holds: a request's own tokens, and where drafts depend on it the one behind."""

    @initialize(
        num_blocks=st.integers(4, 24), region_size=st.none() | st.integers(1, 12), kept=st.sampled_from([*DRAFT_KV])
    )
    def start(self, num_blocks, region_size, kept):
        self.reach = SIZE + DRAFT_KV[kept]
        self.pool = BlockPool(num_blocks, SIZE, region_size, known=KnownBlocks(SIZE, DRAFT_KV[kept]))
        self.users, self.held = [], {}

    def text_of(self, user, index):
        return user.namespace, tuple(user.text[: index * SIZE + self.reach])

    @rule(namespace=NAMESPACES, text=TEXTS)
    def begin(self, namespace, text):
        user = User(namespace, text)
        found = self.pool.find(namespace, text)
        assert len(found) * SIZE < len(text), "one token is left to compute"
        assert [self.held[block] for block in found] == [self.text_of(user, index) for index in range(len(found))]
        could, num_free = self.pool.can_extend(found, len(text)), self.pool.num_free
        if not could:
            assert self.pool.num_free == num_free
            return
        self.pool.share(found)
        user.blocks += found
        user.num_computed = len(found) * SIZE
        assert self.pool.extend(user.blocks, len(text)), "it was said to have room"
        assert user.blocks[: len(found)] == found
        self.users.append(user)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), num_tokens=st.integers(1, 12))
    def compute(self, data, num_tokens):
        """Its newest token is never computed."""
        user = data.draw(st.sampled_from(self.users))
        first, user.num_computed = user.num_computed, min(user.num_computed + num_tokens, len(user.text) - 1)
        for index in range(first // SIZE, user.num_computed // SIZE):
            self.held[user.blocks[index]] = self.text_of(user, index)
        self.pool.known.learn(user.blocks, user.namespace, user.text, user.num_computed)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), more=TEXTS)
    def grow(self, data, more):
        user = data.draw(st.sampled_from(self.users))
        if self.pool.extend(user.blocks, len(user.text) + len(more)):
            user.text = user.text + more

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end(self, data):
        user = data.draw(st.sampled_from(self.users))
        self.users.remove(user)
        self.pool.release(user.blocks)
        assert not user.blocks

    @rule()
    def forget(self):
        self.pool.forget_all()

    @invariant()
    def books_balance(self):
        self.pool.check_integrity(user.blocks for user in self.users)

    @invariant()
    def nobody_writes_where_others_read(self):
        """Blocks behind what is computed are a request's own."""
        for user in self.users:
            own = user.blocks[user.num_computed // SIZE :]
            others = {block for other in self.users if other is not user for block in other.blocks}
            assert not others & set(own)

    def teardown(self):
        for user in self.users:
            self.pool.release(user.blocks)
        assert self.pool.num_free == self.pool.num_blocks
        self.pool.check_integrity([])
        blocks = []
        assert self.pool.extend(blocks, self.pool.num_blocks * SIZE), "every block can be had again"


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestBlocks = PoolMachine.TestCase


def pool_of(num_blocks=8, num_behind=0):
    return BlockPool(num_blocks, SIZE, known=KnownBlocks(SIZE, num_behind))


def served(pool, text, namespace=""):
    """Compute a text and let go of its blocks. Returns which ones it had."""
    found, blocks = pool.find(namespace, text), []
    pool.share(found)
    blocks += found
    assert pool.extend(blocks, len(text))
    pool.known.learn(blocks, namespace, text, len(text) - 1)
    had = list(blocks)
    pool.release(blocks)
    return had


def test_the_end_of_what_was_used_longest_ago_is_forgotten_first():
    pool, texts = pool_of(6), ([0] * 9, [1] * 9)
    for text in texts:
        served(pool, text)
    served(pool, [2] * 9)  # two of its three blocks held nothing
    assert [len(pool.find("", text)) for text in texts] == [1, 2]


def test_a_text_that_is_used_again_stays():
    pool, texts = pool_of(6), ([0] * 9, [1] * 9)
    for text in (*texts, texts[0]):
        served(pool, text)
    served(pool, [2] * 9)
    assert [len(pool.find("", text)) for text in texts] == [2, 1]


def test_what_two_computed_side_by_side_is_found_once_and_goes_on():
    pool = pool_of()
    first, second = [], []
    for blocks in (first, second):
        pool.extend(blocks, 13)
    pool.known.learn(first, "", [0] * 8 + [1] * 5, 8)
    pool.known.learn(second, "", [0] * 8 + [2] * 5, 12)
    assert pool.find("", [0] * 9) == first[:2]
    assert pool.find("", [0] * 8 + [2] * 5) == [*first[:2], second[2]]
    pool.release(second)
    pool.release(first)
    pool.check_integrity([])
    assert pool.find("", [0] * 8 + [2] * 5) == [*pool.find("", [0] * 9), pool.find("", [0] * 8 + [2] * 5)[2]]


def test_namespaces_share_nothing():
    pool = pool_of()
    served(pool, [0] * 9, "tenant 1")
    assert pool.find("tenant 2", [0] * 9) == pool.find("", [0] * 9) == []
    assert len(pool.find("tenant 1", [0] * 9)) == 2


@pytest.mark.parametrize(("kept", "num_found"), [("of tokens", 2), ("of pairs", 1)])
def test_draft_kv_that_depends_on_the_next_token_is_found_by_it_too(kept, num_found):
    pool = pool_of(num_behind=DRAFT_KV[kept])
    served(pool, [0] * 8 + [1] * 5)
    assert len(pool.find("", [0] * 8 + [2] * 5)) == num_found
    assert len(pool.find("", [0] * 8 + [1] * 5)) == 3


def test_nothing_is_found_that_was_forgotten_nor_what_is_appended_to_it():
    pool, text, blocks = pool_of(), [0] * 9, []
    pool.extend(blocks, 13)
    pool.known.learn(blocks, "", text, 8)
    pool.forget_all()
    pool.known.learn(blocks, "", [*text, *[1] * 4], 12)
    assert pool.find("", [*text, *[1] * 4]) == []
    pool.check_integrity([blocks])
    pool.release(blocks)
    served(pool, text)
    assert len(pool.find("", text)) == 2


@pytest.mark.parametrize("num_tokens", [8, 16, 17, 24])
def test_blocks_that_were_found_are_not_free_as_well(num_tokens):
    pool, text = pool_of(6), [0] * 9
    served(pool, text)
    assert pool.extend([], 8)  # another request has two of the six
    found = pool.find("", text)
    can_extend = pool.can_extend(found, num_tokens)
    pool.share(found)
    assert (can_extend, pool.extend(found, num_tokens)) == (num_tokens <= 16, num_tokens <= 16)
