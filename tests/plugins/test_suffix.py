"""The suffix proposer: what it counts, what it drafts, what it remembers of others, and what that costs."""

from __future__ import annotations

import gc
import inspect
import json
import subprocess
import sys
from collections import Counter
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import proposer_of
from plugin_helpers import GREEDY, TINY

from specdec import LLM, SamplingParams
from specdec.plugins.ngram import NgramProposer
from specdec.plugins.suffix import SuffixProposer
from specdec.plugins.suffix.automaton import START, SuffixAutomaton
from specdec.plugins.suffix.corpus import Corpora, Corpus
from specdec.sdk import ConfigError, Draft, Needs, ProposerConfig, RequestView
from specdec.sdk.extensions import State
from specdec.testing import FakeServices, fake_target_info, step_view

K = 4
OPTION = "suffix_decoding_{}"
VLLM_OPTIONS = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
}

texts = st.integers(1, 4).flatmap(lambda alphabet: st.lists(st.integers(0, alphabet), min_size=1, max_size=60))


def proposer_with(k=K, **options):
    parsed = SuffixProposer.Options.parse({OPTION.format(key): value for key, value in options.items()}, "options")
    proposer = SuffixProposer(ProposerConfig(num_draft_tokens=k, options=parsed))
    proposer.bind(fake_target_info(), FakeServices())
    return proposer


def start(proposer, name, prompt, row=0):
    proposer.on_start(RequestView(request_id=name, slot=row, generation=1, prompt_token_ids=prompt))


def finish(proposer, name, row=0):
    proposer.on_finish(RequestView(request_id=name, slot=row, generation=1, prompt_token_ids=()))


def run_step(proposer, k=K, **tokens_by_name) -> list[list[int]]:
    """What the engine does once a step, with the drafts as lists."""
    step = step_view(list(tokens_by_name.values()), k, request_ids=list(tokens_by_name))
    proposer.observe(step)
    return drafted(proposer.propose(step))


def drafted(draft: Draft) -> list[list[int]]:
    assert draft.distribution is None
    return [ids[:length] for ids, length in zip(draft.token_ids.tolist(), draft.lengths.tolist(), strict=True)]


def draft_for(tokens, k=K, **options):
    proposer = proposer_with(k, **options)
    start(proposer, "a", tokens)
    return run_step(proposer, k, a=tokens)[0]


def serve(proposer, name, prompt, output):
    """A whole request: its prompt, its output token by token, its end."""
    start(proposer, name, prompt)
    for length in range(1, len(output) + 1):
        run_step(proposer, **{name: [*prompt, *output[:length]]})
    finish(proposer, name)


def followers(text, context) -> Counter:
    """By definition: which token followed each earlier occurrence of a context."""
    size = len(context)
    return Counter(text[end] for end in range(size, len(text)) if text[end - size : end] == context)


def automaton_of(text, depth=8):
    automaton = SuffixAutomaton(depth)
    automaton.extend(text)
    return automaton


@settings(max_examples=100, deadline=None)
@given(text=texts, depth=st.integers(1, 7))
def test_contexts_are_the_suffixes_that_were_followed_and_their_probabilities_are_shares(text, depth):
    automaton = SuffixAutomaton(depth)
    for end in range(1, len(text) + 1):
        automaton.extend(text[end - 1 : end])
        sofar = text[:end]
        found = list(automaton.contexts(automaton.tail))
        lengths = [context.length for context in found]
        assert lengths == sorted(set(lengths), reverse=True)
        longest = max((n for n in range(1, min(depth, end) + 1) if followers(sofar, sofar[-n:])), default=0)
        assert max(lengths, default=0) == longest
        for context in found:
            counts = followers(sofar, sofar[-context.length :])
            (token,), share = automaton.draft(context, 1, 0.0)
            assert counts[token] == max(counts.values())
            assert share == pytest.approx(counts[token] / counts.total())


@settings(max_examples=60, deadline=None)
@given(text=texts, depth=st.integers(1, 7), num_tokens=st.integers(0, 6))
def test_a_draft_is_the_text_continued_token_by_token(text, depth, num_tokens):
    """Each drafted token follows the longest of the last `depth` tokens, drafted ones included, that was followed."""
    automaton = automaton_of(text, depth)
    context = next(automaton.contexts(automaton.tail), None)
    if context is None:
        return
    draft, _ = automaton.draft(context, num_tokens, 0.0)
    ending = text[-context.length :]
    for token in draft:
        counts = next(c for n in range(len(ending), 0, -1) if (c := followers(text, ending[-n:])))
        assert counts[token] == max(counts.values())
        ending = [*ending, token][-depth:]
    assert len(draft) == num_tokens


@settings(max_examples=60, deadline=None)
@given(text=texts, query=texts, depth=st.integers(1, 6), more=texts)
def test_a_place_in_another_text_is_the_longest_match_there_even_after_that_text_grew(text, query, depth, more):
    automaton = automaton_of(text, depth)
    automaton.separate()
    place = START
    for end, token in enumerate(query, start=1):
        place = automaton.advance(place, token)
        found = [n for n in range(min(depth, end) + 1) if occurs(query[end - n : end], text)]
        assert place.length == max(found)
    automaton.extend(more)
    held = query[len(query) - place.length :]
    counts = followers([*text, -2, *more], held)
    for context in automaton.contexts(place):
        assert context.length <= place.length
    if place.length and counts:
        first = next(automaton.contexts(place))
        assert first.length == place.length
        share = automaton.draft(first, 1, 0.0)[1]
        if share:
            assert share == pytest.approx(max(counts.values()) / counts.total())


def occurs(part, text):
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def test_drafts_what_followed_the_ending():
    assert draft_for([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5, 6]


def test_without_a_repeat_there_is_no_draft():
    assert draft_for([1, 2, 3, 4]) == []


def test_the_most_frequent_continuation_wins_over_the_latest():
    assert draft_for([1, 2, 7, 1, 2, 7, 1, 2, 9, 5, 1, 2], k=1) == [7]


def test_of_equally_frequent_continuations_the_latest_wins():
    assert draft_for([1, 2, 7, 5, 1, 2, 9, 5, 1, 2], k=1) == [9]


def test_a_draft_that_reaches_the_end_of_the_text_goes_round_the_loop():
    assert draft_for([1, 2, 3, 1, 2], k=7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_draft_ends_where_its_probability_falls_below_the_least():
    text = [1, 2, 3, 8, 1, 2, 4, 9, 1, 2]
    assert draft_for(text, min_token_prob=0.6) == []
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2]
    assert draft_for(text, min_token_prob=0.6) == [5]
    assert draft_for(text, min_token_prob=0.5) == [5, 7, 1, 2]


def test_the_factor_bounds_a_draft_by_its_match():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert draft_for(text, max_spec_factor=1.0) == [3, 4]
    assert draft_for(text, max_spec_factor=1.5) == [3, 4, 5]
    assert draft_for(text, max_spec_factor=None) == [3, 4, 5, 6]


@pytest.mark.parametrize("budget", range(K + 1))
def test_no_draft_is_longer_than_its_budget(budget):
    proposer = proposer_with()
    start(proposer, "a", ())
    step = step_view([[1, 2, 3, 4, 5, 6, 1, 2]], K, budget=[budget], request_ids=["a"])
    proposer.observe(step)
    assert drafted(proposer.propose(step)) == [[3, 4, 5, 6][:budget]]


def test_a_replayed_request_is_not_counted_twice():
    proposer = proposer_with(k=1)
    start(proposer, "a", ())
    text = [1, 2, 7, 1, 2, 9, 1, 2, 9, 1, 2]
    run_step(proposer, 1, a=text)
    for length in (3, 9):  # replayed in chunks after a preemption, in another row
        step = step_view([text[:length]], 1, request_ids=["a"], slots=[3], generation=[2], budget=[0])
        proposer.observe(step)
    assert proposer._requests["a"].text.tail.length == 8
    assert run_step(proposer, 1, a=[*text, 9, 1, 2]) == [[9]]
    assert len(proposer._requests["a"].text) == len(text) + 3


def test_an_ended_request_leaves_its_output_and_nothing_else():
    def num_automata():
        gc.collect()
        return sum(type(item) is SuffixAutomaton for item in gc.get_objects())

    proposer = proposer_with()
    idle = num_automata()
    serve(proposer, "a", [50, 51], [1, 2, 3, 4, 5])
    assert num_automata() == idle + 1, "the younger generation of the corpus"
    start(proposer, "b", [1, 2])
    assert run_step(proposer, b=[1, 2]) == [[3, 4, 5]], "the output, up to its end"
    start(proposer, "c", [50])
    assert run_step(proposer, c=[50]) == [[]], "prompts are not kept"


def test_an_id_that_comes_back_starts_anew():
    proposer = proposer_with(max_cached_requests=0)
    serve(proposer, "a", [1, 2], [3, 4, 5])
    start(proposer, "a", [8])
    assert run_step(proposer, a=[8, 1, 2]) == [[]]


def test_a_request_ended_before_it_was_shown_leaves_nothing():
    proposer = proposer_with()
    start(proposer, "a", [1, 2])
    finish(proposer, "a")
    assert len(proposer._corpora) == 0


def test_another_output_is_followed_only_where_its_match_is_longer():
    proposer = proposer_with()
    serve(proposer, "a", (), [2, 3, 9, 9])
    start(proposer, "b", ())
    assert run_step(proposer, b=[1, 2, 3, 7, 1, 2, 3]) == [[7, 1, 2, 3]]
    start(proposer, "c", ())
    assert run_step(proposer, c=[3, 7, 1, 2, 3]) == [[9, 9]]


def test_a_long_prompt_is_found_in_the_corpus_by_its_ending():
    proposer = proposer_with(max_tree_depth=4)
    serve(proposer, "a", (), [1, 2, 3, 4, 5, 6])
    start(proposer, "b", ())
    for tokens in ([9], [9, *range(20, 40), 1, 2, 3]):  # the second step shows more tokens than the depth
        drafts = run_step(proposer, b=tokens)
    assert drafts == [[4, 5, 6]]


def test_a_namespace_drafts_from_its_own_outputs_only(tmp_path):
    proposer = proposer_with()
    proposer.on_start(RequestView(request_id="a", slot=0, generation=1, prompt_token_ids=(), namespace="one"))
    run_step(proposer, a=[1, 2, 3, 4, 5])
    proposer.on_finish(RequestView(request_id="a", slot=0, generation=1, prompt_token_ids=(), namespace="one"))
    proposer.save(tmp_path)
    again = proposer_with()
    again.load(tmp_path)
    for each in (proposer, again):
        drafts = {}
        for namespace in ("", "one", "two"):
            each.on_start(
                RequestView(request_id=namespace, slot=0, generation=1, prompt_token_ids=(), namespace=namespace)
            )
            drafts[namespace] = run_step(each, **{namespace: [1, 2]})[0]
        assert drafts == {"": [], "one": [3, 4, 5], "two": []}


def test_namespaces_hold_together_what_one_may_hold():
    corpora = Corpora(8, 1000, 40)
    for number in range(30):
        corpora.add(f"tenant-{number % 7}", [number] * 9)
        assert 0 < sum(each.num_tokens for each in corpora._by_namespace.values()) <= 40
    assert corpora.automata("tenant-1"), "the latest one"
    corpora.add("nothing", [])
    assert corpora.automata("nothing") == ()
    assert all(map(len, corpora._by_namespace.values())), "an empty corpus is not kept"


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_tree_depth", 10**6), ("max_spec_factor", 1e308), ("max_spec_factor", float("inf"))],
)
def test_numbers_that_no_step_can_serve_are_refused(option, value):
    with pytest.raises(ConfigError, match="less than or equal to") as caught:
        SuffixProposer.Options.parse({f"suffix_decoding_{option}": value}, "proposer_config")
    assert caught.value.code == "SD-E132"


def test_an_output_of_one_namespace_is_taken_in_without_a_look_at_the_others(monkeypatch):
    corpora, looked_at = Corpora(8, 1000, 10_000), []
    for number in range(100):
        corpora.add(f"tenant-{number}", [number] * 9)
    num_tokens = Corpus.num_tokens
    watched = property(lambda corpus: looked_at.append(corpus) or num_tokens.fget(corpus))
    monkeypatch.setattr(Corpus, "num_tokens", watched)
    corpora.add("tenant-7", [7] * 9)
    assert len(looked_at) < 5


def test_no_cached_requests_keeps_requests_apart():
    proposer = proposer_with(max_cached_requests=0)
    serve(proposer, "a", (), [1, 2, 3, 4, 5])
    start(proposer, "b", ())
    assert run_step(proposer, b=[1, 2]) == [[]]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_corpus_holds_the_latest_outputs_and_no_more_than_allowed(limit):
    corpus = Corpus(8, limit, 10_000)
    for number in range(40):
        corpus.add([number, 100, number])
        assert 1 <= len(corpus) <= limit
        newest = [output[0] for half in (corpus._older, corpus._younger) for output in half.outputs]
        assert newest == list(range(number + 1 - len(corpus), number + 1))
        assert len(corpus) >= min(limit // 2, number + 1)


@settings(max_examples=50, deadline=None)
@given(outputs=st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=30), limit=st.integers(4, 80))
def test_the_corpus_holds_no_more_tokens_than_allowed(outputs, limit):
    corpus = Corpus(8, 1000, limit)
    for output in outputs:
        corpus.add(output)
        assert corpus.num_tokens <= limit


def test_requests_follow_the_corpus_through_its_turnover():
    proposer = proposer_with(max_cached_requests=2)
    start(proposer, "live", (), row=1)
    live = []
    for number in range(10, 20):
        serve(proposer, f"r{number}", (), [number, number, number + 20, 7])
        live += [number, number]
        assert run_step(proposer, live=live) == [[number + 20, 7]], "what the ended request was shown to output"


def test_saved_outputs_come_back(tmp_path):
    proposer = proposer_with()
    serve(proposer, "a", (), [1, 2, 3, 4, 5])
    proposer.save(tmp_path / "state")
    other = proposer_with()
    other.load(tmp_path / "state")
    start(other, "b", ())
    assert run_step(other, b=[1, 2]) == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "not enough values"),
        ("{", "Expecting"),
        (json.dumps({"format": 2, "vocab_size": 7}), "'vocab_size': 7"),
        (
            json.dumps({"format": 2, "vocab_size": 64}) + '\n["", [1, 64]]',
            "line 2 is no namespace with a list of token",
        ),
        (json.dumps({"format": 2, "vocab_size": 64}) + '\n["", [1]]\n["", [true]]', "line 3"),
    ],
    ids=["absent", "empty", "cut-off", "other-vocabulary", "id-outside", "no-ids"],
)
def test_outputs_that_do_not_fit_are_refused(content, words, tmp_path):
    if content is not None:
        (tmp_path / "outputs.jsonl").write_text(content)
    proposer = proposer_with()
    with pytest.raises(ConfigError, match=words) as caught:
        proposer.load(tmp_path)
    assert caught.value.code == "SD-E180"
    assert len(proposer._corpora) == 0


def lines_run(automaton, token):
    """How many lines of Python one appended token and one draft execute."""
    count = 0
    automaton_file = inspect.getfile(SuffixAutomaton)

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        if frame.f_code.co_filename != automaton_file:  # finalizers run whenever they like
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        automaton.extend([token])
        for context in automaton.contexts(automaton.tail):
            automaton.draft(context, K, 0.1)
    finally:
        sys.settrace(before)
    return count


def interrupted(number, call, *arguments, **tokens_by_name):
    """Whether an interrupt at a line of the automaton, counted from 1, ended a call before it came to its end."""
    left, automaton_file = number, inspect.getfile(SuffixAutomaton)

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal left
        if frame.f_code.co_filename != automaton_file:
            return None
        left -= event == "line"
        if not left:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments, **tokens_by_name)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


MANY_LINES = 100_000  # a call that runs as many goes round for ever


def test_an_interrupt_at_any_line_of_a_step_costs_no_token_and_no_draft():
    text, number, happened = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2], 0, True
    longer = [*text, 4, 1, 2, 3, 1]
    while happened:
        number += 1
        proposer = proposer_with()
        start(proposer, "a", text[:1])
        run_step(proposer, a=text[:6])
        happened = interrupted(number, run_step, proposer, a=text)
        assert not interrupted(MANY_LINES, run_step, proposer, a=longer), number
        assert run_step(proposer, a=longer) == [draft_for(longer)], number
        assert proposer._requests["a"].output == longer[1:], number
    assert number > 100, "lines were traced"


def test_an_interrupt_while_an_output_is_taken_in_costs_no_output():
    number, happened = 0, True
    outputs = [[1, 2, 3, 1, 2], [5, 6, 1, 2, 7], [8, 9, 10]]
    while happened:
        number += 1
        proposer = proposer_with()
        serve(proposer, "a", (), outputs[0])
        start(proposer, "b", ())
        run_step(proposer, b=outputs[1])
        happened = interrupted(number, finish, proposer, "b")
        serve(proposer, "c", (), outputs[2])
        assert list(map(list, proposer._corpora._by_namespace[""].outputs())) == outputs, number
        start(proposer, "d", ())
        assert run_step(proposer, d=[6, 1, 2]) == [[7]], number
        assert proposer._corpora._num_tokens == sum(map(len, outputs)) + len(outputs)
    assert number > 100, "lines were traced"


@pytest.mark.parametrize("period", [1, 3, 7])
def test_work_per_token_does_not_grow_with_the_text(period):
    loop = list(range(period))
    short, long = automaton_of(loop * 20), automaton_of(loop * 3_000)
    assert lines_run(short, 0) == lines_run(long, 0)


def test_automaton_stays_linear_in_the_text():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 3, (4_000,), generator=generator).tolist()
    for doubled in (text, text + text):
        assert len(automaton_of(doubled)._length) <= 2 * len(doubled)


def test_vllm_options_are_taken_at_the_top_level():
    config = {"method": "suffix", "num_speculative_tokens": 5, **VLLM_OPTIONS}
    llm = LLM("tiny", speculative_config=config, max_model_len=256)
    options = proposer_of(llm)._options
    assert {key: getattr(options, key) for key in VLLM_OPTIONS} == VLLM_OPTIONS


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"suffix_decoding_max_tree_depth": 0}, "SD-E132", "max_tree_depth"),
        ({"suffix_decoding_min_token_prob": 1.5}, "SD-E132", "min_token_prob"),
        ({"suffix_decoding_max_spec_factor": 0}, "SD-E132", "max_spec_factor"),
        ({"suffix_decoding_max_cached_requests": -1}, "SD-E132", "max_cached_requests"),
        ({"suffix_decoding_max_depth": 3}, "SD-E131", "did you mean 'suffix_decoding_max_tree_depth'?"),
    ],
)
def test_unusable_options_are_refused(options, code, words):
    with pytest.raises(ConfigError) as caught:
        SuffixProposer.Options.parse(options, "proposer_config")
    assert caught.value.code == code
    assert words in str(caught.value)


@pytest.mark.parametrize(("cached", "state"), [(0, "per_request"), (1, "shared")])
def test_state_is_shared_only_if_outputs_are_kept(cached, state):
    options = SuffixProposer.Options(suffix_decoding_max_cached_requests=cached)
    needs = SuffixProposer.needs(ProposerConfig(num_draft_tokens=K, options=options), fake_target_info())
    assert needs == Needs(history=True, state=state, extensions=(State(),))


def test_importing_the_plugin_loads_no_torch():
    code = "import sys, specdec.plugins.suffix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def prompts():
    tokenizer = LLM("tiny", max_model_len=64).get_tokenizer()
    rows = [json.loads(line) for line in (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    every = [{"prompt_token_ids": tokenizer(row["prompt"])["input_ids"]} for row in rows]
    return [*every[::3], *every[1::3], *every[2::3]]


@pytest.fixture(scope="module")
def plain(prompts):
    return token_ids(LLM("tiny", max_model_len=512).generate(prompts[:16], GREEDY))


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("k", "count", "passes", "engine"),
    [
        (1, 1, 1, {}),
        (3, 4, 1, {"max_num_batched_tokens": 32}),
        (8, 16, 1, {"max_num_seqs": 16}),
        (5, 6, 1, {"num_kv_blocks": 20, "max_num_batched_tokens": 48}),
        (7, 6, 2, {"max_num_seqs": 2}),
    ],
    ids=["single", "chunked", "sixteen", "preempted", "rows-reused"],
)
def test_greedy_text_is_the_plain_one(k, count, passes, engine, prompts, plain):
    config = {"method": "suffix", "num_speculative_tokens": k}
    with LLM("tiny", speculative_config=config, max_model_len=512, **engine) as llm:
        for _ in range(passes):  # the second time with a corpus that knows every output
            assert token_ids(llm.generate(prompts[:count], GREEDY)) == plain[:count]
        counts = llm.engine.metrics.counts
        assert llm.engine.metrics.acceptance.num_accepted_tokens > 0
        assert ("num_kv_blocks" in engine) == (counts["num_preemptions"] > 0)
        assert not proposer_of(llm)._requests


def test_aborted_requests_are_forgotten(prompts):
    with LLM("tiny", speculative_config={"method": "suffix", "num_speculative_tokens": 4}, max_model_len=512) as llm:
        stream = llm.stream(prompts[:3], SamplingParams(temperature=0, max_tokens=64))
        for _ in range(12):
            next(stream)
        stream.close()
        assert not proposer_of(llm)._requests


def test_the_first_draft_after_a_prompt_is_accepted_no_less_than_the_n_gram_proposers(prompts):
    """Tokens per verification with K = 7, the first draft of each shipped prompt only."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    outputs = token_ids(LLM("tiny", max_model_len=512).generate(prompts, params))
    ngram = NgramProposer.Options(prompt_lookup_min=2, prompt_lookup_max=5)
    found = {}
    for cls, options in ((NgramProposer, ngram), (SuffixProposer, SuffixProposer.Options())):
        accepted = 0
        for prompt, (first, *truth) in zip(prompts, outputs, strict=True):
            proposer = cls(ProposerConfig(num_draft_tokens=7, options=options))
            start(proposer, "a", ())
            tokens = [*prompt["prompt_token_ids"], first]
            step = step_view([tokens], 7, request_ids=["a"])
            proposer.observe(step)
            (draft,) = drafted(proposer.propose(step))
            agrees = [ours == theirs for ours, theirs in zip(draft, truth, strict=False)]
            accepted += [*agrees, False].index(False)
        found[cls] = 1 + accepted / len(prompts)
    assert found[SuffixProposer] >= found[NgramProposer] > 2
