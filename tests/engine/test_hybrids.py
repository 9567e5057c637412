"""Targets whose layers keep a state: their text is transformers' own, whatever is drafted and however it is cut up."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, TINY, assert_same_tokens, checked_step, counter, generate, make_llm, run, tokens
from inside import target_of, verify_with
from transformers import AutoModelForCausalLM

from specdec import SamplingParams
from specdec.core.engine import memory
from specdec.core.rejection import sampler
from specdec.sdk import ConfigError
from specdec.sdk.errors import UnsupportedModelError

HYBRID = TINY / "hybrid"
SCARCE = {"num_kv_blocks": 20, "block_size": 16}
CHUNKED = {"max_num_batched_tokens": 48}
PROPOSERS = {
    "none": (None, {}),
    "ngram": ("ngram", {}),
    "mtp": ("mtp", {}),
    "garbage": ("Scripted", {"wrong_every": 1}),
    "ragged": ("Scripted", {"wrong_every": 5, "ragged": True}),
}


@pytest.fixture(scope="module")
def hybrid():
    model = AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def texts(prompts):
    return prompts[:4]


@pytest.fixture(scope="module")
def truth(hybrid, texts):
    return [generate(hybrid, text) for text in texts]


@pytest.fixture(scope="module")
def known(texts, truth):
    return [[*text, *output] for text, output in zip(texts, truth, strict=True)]


def hybrid_llm(name, known=(), **settings):
    proposer, options = PROPOSERS[name]
    options = options | {"sequences": known} if proposer == "Scripted" else options
    return make_llm(proposer, options=options, model=HYBRID, **settings)


def served(llm, texts, params=GREEDY):
    return tokens(llm.generate([{"prompt_token_ids": text} for text in texts], params))


QUICK = "none", "mtp"
MARKED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in PROPOSERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
def test_greedy_text_is_that_of_transformers(name, texts, truth, known, hybrid):
    assert_same_tokens(served(hybrid_llm(name, known), texts), truth, texts, hybrid)


@pytest.mark.parametrize("name", ["mtp", *(pytest.param(name, marks=pytest.mark.full) for name in ("none", "ragged"))])
@pytest.mark.parametrize("settings", [CHUNKED, SCARCE | CHUNKED], ids=["chunks", "preemption"])
def test_chunks_and_preemption_change_nothing(name, settings, texts, truth, known, hybrid):
    llm = hybrid_llm(name, known, **settings)
    assert_same_tokens(served(llm, texts), truth, texts, hybrid)
    assert (counter(llm, "num_preemptions") > 0) == ("num_kv_blocks" in settings)


def test_sampled_text_is_that_of_plain_decoding(texts):
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=32, ignore_eos=True, n=2)
    prompts = [{"prompt_token_ids": text} for text in texts[:2]]
    plain, drafted = (
        [[each.token_ids for each in output.outputs] for output in hybrid_llm(name).generate(prompts, params)]
        for name in ("none", "ngram")
    )
    assert plain == drafted
    assert plain[0][0] != plain[0][1]


def test_an_aborted_request_leaves_its_row_clean(texts, truth, hybrid):
    engine = hybrid_llm("ngram", max_num_seqs=1).engine
    aborted = engine.add_request(texts[1], GREEDY)
    for _ in range(3):
        checked_step(engine)
    engine.abort(aborted)
    engine.add_request(texts[0], GREEDY)
    (request,) = [each for each in run(engine).values() if each.request_id != aborted]
    assert_same_tokens([request.output_token_ids], truth[:1], texts[:1], hybrid)


def once_interrupted(function):
    """The function, whose first call ends in an interruption after its work."""
    interruptions = iter([KeyboardInterrupt()])

    def call(*args, **named):
        result = function(*args, **named)
        for interruption in interruptions:
            raise interruption
        return result

    return call


@pytest.mark.parametrize("stage", ["forward", pytest.param("verify", marks=pytest.mark.full)])
def test_an_interrupted_step_is_computed_anew(stage, texts, truth, hybrid):
    llm = hybrid_llm("ngram")
    llm.engine.add_request(texts[0], GREEDY)
    for _ in range(4):
        checked_step(llm.engine)
    if stage == "forward":
        target_of(llm).run = once_interrupted(target_of(llm).run)
    else:
        verify_with(llm, once_interrupted(sampler.verify))
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    (request,) = run(llm.engine).values()
    assert_same_tokens([request.output_token_ids], truth[:1], texts[:1], hybrid)
    assert counter(llm, "num_preemptions") == 1


def test_states_are_counted_in_memory(monkeypatch):
    per_row = sum(layout.bytes_per_row(4) for layout in target_of(hybrid_llm("ngram")).mixers.layouts)
    monkeypatch.setattr(memory, "free_memory", lambda device: 8 * per_row)
    with pytest.raises(ConfigError, match=r"SD-E178 (.|\n)*max_num_seqs with a state each(.|\n)*at most 8"):
        hybrid_llm("ngram", num_kv_blocks=1)


@pytest.mark.parametrize("asked", ["torch_compile", "cuda_graphs"])
def test_forms_that_fix_the_rows_of_a_step_are_refused(asked):
    with pytest.raises(ConfigError, match=f"SD-E(261|147) (.|\n)*{asked}"):
        hybrid_llm("none", **{asked: True})


def test_as_a_draft_model_a_hybrid_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"SD-E262 (.|\n)*linear_attention"):
        make_llm("draft_model", speculative={"model": str(HYBRID)})
