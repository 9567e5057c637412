"""Sampled text inside vLLM's V2 runner has the target's distribution, and a proposer that lies is found out."""

from __future__ import annotations

from collections import Counter

import grammar_of_five
import pytest
import torch
from likely_pairs import REFUSING, TEMPERATURE, Grammar, chi_square, likely_pairs
from test_transformers import chi_square_of, distribution_of, small_model_of_five, tail_bound
from transformers.generation import TemperatureLogitsWarper

pytestmark = pytest.mark.full

PROBABILISTIC = {"draft_sample_method": "probabilistic"}
ASYNC = {"async_scheduling": True}


@pytest.mark.parametrize(("num_samples", "regex", "how"), [(600, None, {}), (200, REFUSING, ASYNC)])
def test_sampled_text_of_a_head_follows_the_targets_distribution(
    run_engine, model, batch, tokenizer, tiny_drafter, record, num_samples, regex, how
):
    """The first token is sampled plainly, the second where a draft is verified. A grammar refuses likely drafts."""
    prompt = batch[0][:16] if regex else batch[1][:16]
    pairs = likely_pairs(model, prompt, 8 / num_samples, regex and Grammar(tokenizer, regex))
    asked = {"structured_outputs": {"regex": regex}} if regex else {}
    run = run_engine(
        "eagle3",
        k=2,
        specdec={"model": tiny_drafter("eagle3")},
        speculative=PROBABILISTIC,
        batches=[[prompt]],
        sampling={"temperature": TEMPERATURE, "n": num_samples, "max_tokens": 3, "ignore_eos": True, "seed": 7} | asked,
        max_num_seqs=64,
        **how,
    )
    assert run["error"] is None
    assert run["reports"][0]["num_draft_tokens"] > 0
    deviate = chi_square(Counter((one[0], one[1]) for one in run["outputs"][0][0]), num_samples, pairs)
    assert deviate < 3.7, "1 in 10,000 seeds gives more"
    record(run, "sampled text follows the target's distribution")


@pytest.fixture(scope="module")
def target_of_five(tmp_path_factory):
    """A target with a vocabulary of five tokens, as vLLM and transformers run it."""
    directory = tmp_path_factory.mktemp("five")
    target = small_model_of_five(head_dim=32)  # vLLM attends on a CPU with no smaller heads
    target.save_pretrained(directory)
    return directory, target


@pytest.mark.parametrize(("proposer", "lossless"), [("Drawn", True), ("Modest", False)])
def test_samples_have_the_exact_distribution_of_three_tokens_and_a_mild_lie_about_q_shows(
    run_engine, target_of_five, record, proposer, lossless
):
    """Every token is possible in what the liar reports, so nothing but the samples gives it away."""
    directory, target = target_of_five
    num_samples, prompt = 400, [1, 2, 3]
    run = run_engine(
        "Configured",
        k=2,
        specdec={"method": f"adapter_proposers:{proposer}", "on_proposer_error": "raise"},
        speculative=PROBABILISTIC,
        batches=[[prompt]],
        sampling={"temperature": TEMPERATURE, "n": num_samples, "max_tokens": 4, "seed": 3, "detokenize": False},
        model=str(directory),
        skip_tokenizer_init=True,
        max_model_len=32,
        max_num_seqs=50,
    )
    assert run["error"] is None
    assert 0 < run["reports"][0]["draft_acceptance_rate"] < 1
    counts = torch.zeros(5, 5, 5)
    for text, seen in Counter(tuple(one[:3]) for one in run["outputs"][0][0]).items():
        counts[text] = seen
    distribution = distribution_of(target, torch.tensor([prompt]), 3, TemperatureLogitsWarper(TEMPERATURE))
    statistic, degrees = chi_square_of(counts, distribution)
    assert (statistic <= tail_bound(degrees)) == lossless, statistic
    if lossless:
        record(run, "sampled text follows the target's distribution", "draft probabilities in verification")


@pytest.mark.parametrize("options", [{"speculative": False}, {}], ids=["without drafts", "with drafts"])
def test_slots_that_vllm_verifies_without_a_draft_change_no_distribution(run_engine, target_of_five, options):
    """With drafts that stay on the device vLLM verifies K slots of each request, also where nothing was drafted."""
    directory, target = target_of_five
    num_samples, prompt = 400, [1, 2, 3]
    sampling = {"temperature": TEMPERATURE, "n": num_samples, "max_tokens": 4, "seed": 3, "detokenize": False}
    run = run_engine(
        "Configured",
        k=2,
        specdec={"method": "adapter_proposers:DrawnOnDevice", "on_proposer_error": "raise"},
        speculative=PROBABILISTIC,
        batches=[[prompt]],
        sampling=sampling | {"extra_args": {"specdec": options}},
        model=str(directory),
        skip_tokenizer_init=True,
        max_model_len=32,
        max_num_seqs=50,
        **ASYNC,
    )
    assert run["error"] is None
    counts = torch.zeros(5, 5, 5)
    for text, seen in Counter(tuple(one[:3]) for one in run["outputs"][0][0]).items():
        counts[text] = seen
    distribution = distribution_of(target, torch.tensor([prompt]), 3, TemperatureLogitsWarper(TEMPERATURE))
    statistic, degrees = chi_square_of(counts, distribution)
    assert statistic <= tail_bound(degrees), statistic


@pytest.fixture(scope="module")
def run_with_grammar(run_engine, tmp_path_factory):
    """Sample texts under a grammar with drawn drafts. Returns the run, and its chi-square against the exact truth."""
    directory = tmp_path_factory.mktemp("with_grammar")
    target = grammar_of_five.write_target(directory / "target")
    grammar_of_five.write_target(directory / "other", seed=grammar_of_five.OTHER)
    drafters = {
        "Drawn": ("Configured", {"method": "adapter_proposers:Drawn", "on_proposer_error": "raise"}),
        "draft_model": ("draft_model", {"model": str(directory / "other"), "on_proposer_error": "raise"}),
    }

    def run(drafter, how):
        name, specdec = drafters[drafter]
        run = run_engine(
            name,
            k=2,
            specdec=specdec,
            batches=[[grammar_of_five.PROMPT]],
            sampling=grammar_of_five.SAMPLING | {"n": 400},
            model=str(directory / "target"),
            speculative=PROBABILISTIC,
            **grammar_of_five.ENGINE | how,
        )
        assert run["error"] is None
        return run, grammar_of_five.chi_square(target, run["outputs"][0][0])

    return run


@pytest.mark.parametrize(
    ("drafter", "how"),
    [("Drawn", {}), ("draft_model", {}), ("Drawn", ASYNC), ("draft_model", ASYNC)],
)
def test_sampled_text_under_a_grammar_has_the_exact_distribution(run_with_grammar, record, drafter, how):
    """The first refused draft is verified by its probability."""
    run, ratio = run_with_grammar(drafter, how)
    assert ratio <= 1
    assert 0 < run["reports"][0]["draft_acceptance_rate"] < 1
    assert "grammar terminated or rejected draft" not in run["log"]
    record(run, "sampled text follows the target's distribution")


@pytest.mark.parametrize("how", [{}, ASYNC])
def test_drawn_drafts_that_vllm_cuts_before_refused_tokens_are_biased(run_with_grammar, how):
    """The control of the test above."""
    _, ratio = run_with_grammar("draft_model", how | {"cuts_refused": True})
    assert ratio > 1
