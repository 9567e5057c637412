"""The n-gram proposer: what it drafts, what it remembers, and what that costs."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import dataclass
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.plugins.ngram import NgramProposer
from specdec.plugins.ngram.index import BranchingIndex, NgramIndex
from specdec.sdk import (
    PADDING_TOKEN_ID,
    ConfigError,
    Draft,
    KeptTokens,
    Phase,
    ProposerConfig,
    RequestView,
    StepView,
)
from specdec.testing.fakes import FakeHistory

NUM_ROWS = 3
NAMES = "abcde"
K = 4


class NoRandom:
    """One-hot drafts need no random numbers."""

    def uniform(self, draft_index: int) -> torch.Tensor:
        raise AssertionError("this proposer draws nothing")


@dataclass
class Shown:
    """One request of a step: its tokens up to `committed_length`, in `row`."""

    request_id: str
    row: int
    tokens: list[int]
    budget: int = K
    generation: int = 0


def step_view(*shown: Shown) -> StepView:
    """A step that shows these requests; kept tokens are left empty, as nothing asks for them."""

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    none = torch.zeros(len(shown), dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.int64)
    return StepView(
        requests=tuple(request_view(each.request_id, each.row, each.generation) for each in shown),
        width=K,
        slots=column([request.row for request in shown]),
        generation=column([request.generation for request in shown]),
        phase=torch.full_like(none, Phase.DECODE),
        committed_length=column([len(request.tokens) for request in shown]),
        newest_token=column([request.tokens[-1] for request in shown]),
        num_drafted=none,
        num_accepted=none,
        budget=column([request.budget for request in shown]),
        kept=KeptTokens(
            token_offsets=torch.zeros(len(shown) + 1, dtype=torch.int64),
            num_kept=none,
            kept_start=none,
            positions=empty,
            token_ids=empty,
            next_token_ids=empty,
        ),
        random=NoRandom(),
        history=FakeHistory([request.tokens for request in shown]),
    )


def request_view(request_id: str, row: int = 0, generation: int = 0) -> RequestView:
    return RequestView(request_id=request_id, slot=row, generation=generation, prompt_token_ids=())


def proposer_with(**options: int) -> NgramProposer:
    parsed = NgramProposer.Options.parse(options, "proposer_config")
    return NgramProposer(ProposerConfig(num_draft_tokens=K, options=parsed))


def run_step(proposer: NgramProposer, *shown: Shown) -> Draft:
    """What the engine does once a step."""
    step = step_view(*shown)
    proposer.observe(step)
    return proposer.propose(step)


def drafted(draft: Draft) -> list[list[int]]:
    """The drafted ids of each row, after checking the padding."""
    assert draft.distribution is None
    assert draft.token_ids.dtype == draft.lengths.dtype == torch.int64
    assert draft.token_ids.shape == (len(draft.lengths), K)
    rows = list(zip(draft.token_ids.tolist(), draft.lengths.tolist(), strict=True))
    assert all(ids[length:] == [PADDING_TOKEN_ID] * (K - length) for ids, length in rows)
    return [ids[:length] for ids, length in rows]


def draft_for(tokens: list[int], budget: int = K, **options: int) -> list[int]:
    """The draft of a fresh proposer for one request with these tokens."""
    proposer = proposer_with(**options)
    proposer.on_start(request_view("a"))
    return drafted(run_step(proposer, Shown("a", 0, tokens, budget)))[0]


def rescan(tokens: list[int], min_length: int, max_length: int, budget: int) -> list[int]:
    """The definition: compare every suffix, longest first, with every earlier place, most recent first."""
    for length in range(max_length, min_length - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                return [tokens[place + i % (len(tokens) - place)] for i in range(budget)]
    return []


def test_drafts_what_followed_the_suffix() -> None:
    assert draft_for([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5, 6]


def test_no_earlier_occurrence_no_draft() -> None:
    assert draft_for([1, 2, 3, 4]) == []


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    text = [1, 2, 3, 10, 11, 12, 13, 7, 2, 3, 20, 21, 22, 23, 1, 2, 3]
    assert draft_for(text, prompt_lookup_min=2, prompt_lookup_max=3) == [10, 11, 12, 13]


def test_tokens_beyond_the_maximum_are_not_compared() -> None:
    text = [1, 2, 3, 10, 11, 12, 13, 7, 2, 3, 20, 21, 22, 23, 1, 2, 3]
    assert draft_for(text, prompt_lookup_min=2, prompt_lookup_max=2) == [20, 21, 22, 23]


def test_a_match_below_the_minimum_is_no_match() -> None:
    text = [1, 2, 3, 9, 2, 3]
    assert draft_for(text, prompt_lookup_min=3, prompt_lookup_max=5) == []
    assert draft_for(text, prompt_lookup_min=2, prompt_lookup_max=5) == [9, 2, 3, 9]


def test_the_most_recent_of_equally_long_matches_wins() -> None:
    assert draft_for([1, 2, 30, 31, 32, 33, 1, 2, 40, 41, 42, 43, 1, 2]) == [40, 41, 42, 43]


def test_a_draft_that_reaches_the_end_of_the_text_repeats_the_period() -> None:
    assert draft_for([7, 7, 7]) == [7, 7, 7, 7]
    assert draft_for([1, 2, 3, 1, 2]) == [3, 1, 2, 3]


@pytest.mark.parametrize("budget", range(K + 1))
def test_a_draft_is_as_long_as_its_budget(budget: int) -> None:
    assert draft_for([1, 2, 3, 4, 5, 6, 1, 2], budget) == [3, 4, 5, 6][:budget]


def test_rows_of_one_step_have_drafts_of_their_own() -> None:
    proposer = proposer_with()
    for row, name in enumerate("abc"):
        proposer.on_start(request_view(name, row))
    draft = run_step(
        proposer,
        Shown("c", 2, [4, 5, 6, 4, 5], budget=1),
        Shown("a", 0, [1, 2, 3, 1, 2], budget=3),
        Shown("b", 1, [1, 2, 3, 4, 5]),
    )
    assert drafted(draft) == [[6], [3, 1, 2], []]


def test_tokens_shown_without_a_budget_are_indexed() -> None:
    proposer = proposer_with()
    proposer.on_start(request_view("a"))
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    for length in (3, 6):  # chunks of the prompt
        assert drafted(run_step(proposer, Shown("a", 0, text[:length], budget=0))) == [[]]
    assert drafted(run_step(proposer, Shown("a", 0, text))) == [[3, 4, 5, 6]]


def test_a_preempted_request_keeps_its_index_while_it_is_replayed() -> None:
    proposer = proposer_with()
    proposer.on_start(request_view("a", row=0))
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    run_step(proposer, Shown("a", 0, text))
    for length in (2, 5):
        run_step(proposer, Shown("a", 2, text[:length], budget=0, generation=1))
    replayed = run_step(proposer, Shown("a", 2, [*text, 3], generation=1))
    assert drafted(replayed) == [[4, 5, 6, 1]]


def test_a_finished_request_leaves_nothing_behind() -> None:
    def num_indexes() -> int:
        return sum(type(item) is NgramIndex for item in gc.get_objects())

    gc.collect()
    before = num_indexes()
    proposer = proposer_with()
    proposer.on_start(request_view("a"))
    run_step(proposer, Shown("a", 0, [1, 2, 3, 4]))
    assert num_indexes() == before + 1
    proposer.on_finish(request_view("a"))
    assert num_indexes() == before
    proposer.on_start(request_view("a"))
    assert drafted(run_step(proposer, Shown("a", 0, [8, 1, 2]))) == [[]]


@settings(max_examples=300, deadline=None)
@given(
    chunks=st.integers(1, 4).flatmap(
        lambda alphabet: st.lists(st.lists(st.integers(0, alphabet), max_size=12), max_size=20)
    ),
    min_length=st.integers(1, 4),
    spread=st.integers(0, 6),
    budget=st.integers(0, 9),
)
def test_index_equals_a_rescan(chunks: list[list[int]], min_length: int, spread: int, budget: int) -> None:
    index = NgramIndex(min_length, min_length + spread)
    tokens: list[int] = []
    for chunk in chunks:
        index.extend(chunk)
        tokens += chunk
        assert len(index) == len(tokens)
        assert index.continuation(budget) == rescan(tokens, min_length, min_length + spread, budget)


class Requests(RuleBasedStateMachine):
    """Requests that start, grow, are preempted, replayed in chunks and finished, in changing rows."""

    def __init__(self) -> None:
        super().__init__()
        self.proposer = proposer_with(prompt_lookup_min=1, prompt_lookup_max=3)
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}  # tokens with KV
        self.rows: dict[str, int] = {}  # absent while preempted

    @precondition(lambda self: self.free_rows() and len(self.tokens) < len(NAMES))
    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=30), data=st.data())
    def start(self, prompt: list[int], data: st.DataObject) -> None:
        # A name may return once its request has finished.
        name = data.draw(st.sampled_from([n for n in NAMES if n not in self.tokens]))
        self.place(name, data)
        self.tokens[name] = prompt
        self.proposer.on_start(request_view(name, self.rows[name]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        shown = [self.advance(name, data) for name in names]
        draft = run_step(self.proposer, *shown) if shown else None
        if draft is not None:
            assert drafted(draft) == [rescan(request.tokens, 1, 3, request.budget) for request in shown]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        del self.rows[data.draw(st.sampled_from(sorted(self.rows)))]

    @precondition(lambda self: self.free_rows() and len(self.rows) < len(self.tokens))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.place(data.draw(st.sampled_from(sorted(self.tokens.keys() - self.rows.keys()))), data)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[name]
        self.rows.pop(name, None)
        self.proposer.on_finish(request_view(name))

    @invariant()
    def rows_belong_to_one_request(self) -> None:
        assert len(set(self.rows.values())) == len(self.rows)

    def advance(self, name: str, data: st.DataObject) -> Shown:
        """A chunk of what is still to be computed, or a few new tokens with a draft wanted."""
        tokens, computed = self.tokens[name], self.computed[name]
        chunk = data.draw(st.integers(1, 12))
        self.computed[name] = min(computed + chunk, len(tokens))
        if computed + chunk < len(tokens):
            return Shown(name, self.rows[name], tokens[: computed + chunk], budget=0)
        tokens += data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=K + 1))
        self.computed[name] = len(tokens) - 1  # the newest token has no KV yet
        return Shown(name, self.rows[name], list(tokens), budget=data.draw(st.integers(0, K)))

    def place(self, name: str, data: st.DataObject) -> None:
        self.rows[name] = data.draw(st.sampled_from(self.free_rows()))
        self.computed[name] = 0

    def free_rows(self) -> list[int]:
        return sorted(set(range(NUM_ROWS)) - set(self.rows.values()))


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def tree_of(tokens: list[int], num_nodes: int, max_depth: int, min_length: int = 2) -> list[tuple[int, int]]:
    index = BranchingIndex(min_length, 5)
    index.extend(tokens)
    return index.tree(num_nodes, max_depth)


def paths_in(tree: list[tuple[int, int]]) -> set[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for parent, token in tree:
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def test_a_tree_has_what_followed_each_of_the_matches() -> None:
    text = [1, 2, 30, 31, 9, 1, 2, 40, 41, 9, 1, 2, 30, 32, 9, 1, 2]
    assert paths_in(tree_of(text, 8, 2)) == {(30,), (30, 32), (30, 31), (40,), (40, 41)}


def test_what_followed_most_matches_comes_first_and_longer_matches_count_more() -> None:
    text = [1, 2, 30, 9, 1, 2, 40, 9, 1, 2, 30, 8, 1, 2]
    assert [token for _, token in tree_of(text, 2, 1)] == [30, 40]
    longer = [7, 1, 2, 40, 9, 1, 2, 30, 9, 1, 2, 30, 8, 7, 1, 2]
    assert [token for _, token in tree_of(longer, 2, 1)] == [40, 30]


def test_matches_of_any_length_have_a_weight() -> None:
    index = BranchingIndex(2, 600)
    index.extend([1] * 601)
    assert index.tree(2, 2) == [(-1, 1), (0, 1)]


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    min_length=st.integers(1, 3),
    num_nodes=st.integers(1, 16),
    max_depth=st.integers(1, 6),
)
def test_a_tree_has_the_chains_first_token_and_stays_in_its_bounds(
    tokens: list[int], min_length: int, num_nodes: int, max_depth: int
) -> None:
    chain = rescan(tokens, min_length, 5, max_depth)
    tree = tree_of(tokens, num_nodes, max_depth, min_length)
    assert bool(tree) == bool(chain)
    assert len(tree) <= num_nodes
    assert len(set(tree)) == len(tree), "siblings differ"
    assert all(len(path) <= max_depth for path in paths_in(tree))
    whole = paths_in(tree_of(tokens, 64, max_depth, min_length))
    assert not chain or len(whole) == 64 or tuple(chain) in whole


def lines_run(index: NgramIndex, token: int) -> int:
    """How many lines of Python one appended token and one look-up execute."""
    count = 0
    index_file = NgramIndex.extend.__code__.co_filename

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        if frame.f_code.co_filename != index_file:  # a finaliser that the collector runs in between
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        index.extend([token])
        index.continuation(K)
    finally:
        sys.settrace(before)
    return count


def test_work_per_token_does_not_grow_with_the_text() -> None:
    period = [1, 2, 3, 4, 5, 6, 7]
    short, long = NgramIndex(2, 5), NgramIndex(2, 5)
    short.extend(period * 3)
    long.extend(period * 3_000)
    assert lines_run(short, 1) == lines_run(long, 1)


def test_work_on_text_without_repeats_does_not_grow_with_the_maximum() -> None:
    narrow, wide = NgramIndex(2, 2), NgramIndex(2, 64)
    narrow.extend(range(200))
    wide.extend(range(200))
    assert lines_run(wide, 200) <= lines_run(narrow, 200) + 1


@pytest.mark.parametrize(
    ("given_options", "expected"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 4}, (1, 4)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": 4}, (4, 4)),
    ],
    ids=["neither", "maximum", "minimum", "both", "null"],
)
def test_a_length_left_out_equals_the_other(given_options: dict[str, int], expected: tuple[int, int]) -> None:
    options = NgramProposer.Options.parse(given_options, "proposer_config")
    assert (options.min_length, options.max_length) == expected


@pytest.mark.parametrize(
    ("given_options", "code", "words"),
    [
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "SD-E132", "prompt_lookup_min (4) is above"),
        ({"prompt_lookup_min": 0}, "SD-E132", "prompt_lookup_min"),
        ({"prompt_lookup_max": 0}, "SD-E132", "prompt_lookup_max"),
        ({"prompt_lookup_max": 10**6}, "SD-E132", "less than or equal to 64"),
        ({"prompt_lookup_max": "many"}, "SD-E132", "'many'"),
        ({"prompt_lookup_maximum": 3}, "SD-E131", "did you mean 'prompt_lookup_max'?"),
    ],
    ids=["minimum-above-maximum", "minimum-0", "maximum-0", "endless", "no-number", "misspelt"],
)
def test_unusable_options_are_refused(given_options: dict[str, object], code: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NgramProposer.Options.parse(given_options, "proposer_config")
    assert caught.value.code == code
    assert words in str(caught.value)


def test_importing_the_plugin_loads_no_torch() -> None:
    code = "import sys, specdec.plugins.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
