"""Measuring with real engines on the packaged model."""

import textwrap
from contextlib import closing
from dataclasses import replace

import pytest

from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine
from specdec.lab.equality import compare
from specdec.lab.measure import TimedEngine, merged_acceptance, outputs_of, take_turns, units_of
from specdec.lab.prompts import BenchPrompt

CONFIG = EngineConfig(model="tiny", max_num_seqs=2, max_model_len=64)
LENGTH = 12
REMEMBER = """
from specdec.sdk import Draft, Needs

class Remember:
    "Drafts from everything that any request ever said: a corpus that all requests share."
    needs = Needs(history=True, state="shared")
    built = 0

    def __init__(self, config):
        type(self).built += 1
        self.following = {}

    def observe(self, step):
        for b in range(len(step)):
            tokens = step.history.token_ids(b)
            for i in range(2, len(tokens)):
                self.following[tokens[i - 2], tokens[i - 1]] = tokens[i]

    def propose(self, step):
        drafts = []
        for tokens, budget in zip(step.history.tail(2).tolist(), step.budget.tolist()):
            while len(tokens) < budget + 2 and tuple(tokens[-2:]) in self.following:
                tokens.append(self.following[tuple(tokens[-2:])])
            drafts.append(tokens[2:])
        return Draft.from_lists(drafts, step.width)
"""


def bench_prompts():
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    texts = {"one": ("a", range(300, 320)), "two": ("a", range(400, 410)), "three": ("b", range(500, 530))}
    return [BenchPrompt(name, category, tuple(ids), params) for name, (category, ids) in texts.items()]


def run(speculative_config, num_repeats=2):
    finished = []
    prompts = bench_prompts()
    engine = TimedEngine(lambda: Engine(CONFIG, speculative_config))
    plain = TimedEngine(lambda: Engine(CONFIG))
    turns = take_turns(
        [engine, plain],
        units_of(prompts),
        num_repeats=num_repeats,
        num_warmup=1,
        on_finished=lambda each: finished.append(each),
    )
    return turns, finished


@pytest.fixture(scope="module")
def ngram_run():
    return run({"method": "ngram", "num_speculative_tokens": 3})


def test_each_repeat_has_a_pass_per_category_for_both_engines(ngram_run):
    turns, finished = ngram_run
    for passes, plain in turns:
        assert [each.category for each in passes] == ["a", "b"]
        assert [each.category for each in plain] == ["a", "b"]
        assert [sorted(each.outputs) for each in passes] == [["one", "two"], ["three"]]
    assert len(finished) == 3 * 2 * 2


def test_counts_of_a_pass_exclude_what_the_engine_did_before(ngram_run):
    turns, _ = ngram_run
    for passes, _ in turns:
        total = merged_acceptance(passes)
        assert total.num_committed_tokens == 3 * LENGTH
        assert total.num_steps + total.num_accepted_tokens == 3 * LENGTH
        assert sum(each.num_propose_calls for each in passes) > 0
    assert merged_acceptance(turns[0][0]) == merged_acceptance(turns[1][0])


def test_plain_passes_draft_nothing(ngram_run):
    turns, _ = ngram_run
    plain = merged_acceptance(turns[0][1])
    assert plain.num_drafts == 0
    assert plain.tokens_per_target_step == 1
    assert plain.num_steps == 3 * LENGTH


def test_outputs_equal_plain_decoding(ngram_run):
    turns, _ = ngram_run
    for passes, plain in turns:
        assert outputs_of(passes) == outputs_of(plain)


def test_no_repeat_profits_from_what_a_shared_corpus_learned_before(tmp_path, monkeypatch):
    (tmp_path / "remembering.py").write_text(textwrap.dedent(REMEMBER))
    monkeypatch.syspath_prepend(tmp_path)
    turns, _ = run({"model": "remembering:Remember", "num_speculative_tokens": 3})
    first, second = (merged_acceptance(passes) for passes, _ in turns)
    assert first == second
    assert 0 < first.num_accepted_tokens < 3 * LENGTH - 3


def test_an_engine_that_is_built_anew_is_warm_before_it_is_timed():
    engine = TimedEngine(lambda: Engine(CONFIG, {"method": "suffix", "num_speculative_tokens": 3}))
    with closing(engine):
        for number in (1, 2):
            before = engine.engine
            engine.forget(bench_prompts()[:number])
            assert engine.engine is not before
            assert engine.engine.metrics.acceptance.num_committed_tokens == number * LENGTH


def test_a_difference_comes_with_the_targets_own_choice():
    engine = Engine(CONFIG, {"method": "ngram", "num_speculative_tokens": 3})
    prompt = list(range(300, 320))
    done = TimedEngine(lambda: engine).run([replace(bench_prompts()[0], token_ids=tuple(prompt))], lambda _: None)
    output = list(done.outputs["one"])
    changed = [*output[:5], (output[5] + 1) % 100, *output[6:]]
    (difference,) = compare(engine, {"x": prompt, "y": prompt}, {"x": output, "y": output}, {"x": changed, "y": output})
    assert (difference.prompt_id, difference.position) == ("x", 5)
    assert (difference.plain_token_id, difference.found_token_id) == (output[5], changed[5])
    assert difference.one_by_one.token_ids[0] == difference.in_one_pass.token_ids[0] == output[5]
    assert difference.one_by_one.margin == pytest.approx(difference.in_one_pass.margin, abs=1e-3)
    assert difference.one_by_one.margin > 0
