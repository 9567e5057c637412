"""Losslessness as a number: each verifier's exact output distribution, found by bisection, against the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.core.rejection import NO_PROPOSAL, DraftRows, verify
from specdec.testing.rejection import reference
from specdec.testing.rejection.exact_distribution import Problem, exact_distribution
from specdec.testing.rejection.reference import Params

from .problems import DRAFTERS, SAMPLING, problem_of, random_model, with_lengths

DOUBLE_TOLERANCE = 1e-12
SINGLE_TOLERANCE = 2e-7
STRUCTURES = ["zeros_p", "zeros_q", "zeros", "equal", "disjoint", "single", "ties"]


def is_lossless(problem: Problem) -> bool:
    """Within the tolerance of the logits' precision, which also says how far the bisection must go."""
    if problem.target_logits[0].dtype == torch.float64:
        return exact_distribution(verify, problem, num_iterations=46).total_variation <= DOUBLE_TOLERANCE
    return exact_distribution(verify, problem, num_iterations=32).total_variation <= SINGLE_TOLERANCE


def by_prefix(drafts: Tensor) -> Tensor:
    """A ragged length that looks at the first draft to decide on the second: legal, it is that draft's prefix."""
    return 1 + (drafts[:, 0] % 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_follows_target_distribution(drafter: str, sampling: str, dtype: torch.dtype) -> None:
    model = random_model(seed=3)
    assert is_lossless(problem_of(model, DRAFTERS[drafter](model, dtype), SAMPLING[sampling], dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_follows_target_distribution_of_half_precision_logits(drafter: str, dtype: torch.dtype) -> None:
    model = random_model(seed=3)
    reported = DRAFTERS[drafter](model, dtype if drafter.endswith("logits") else torch.float32)
    assert is_lossless(problem_of(model, reported, SAMPLING["all"], dtype))


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_distribution_survives_zeros_ties_and_disjoint_supports(drafter: str, structure: str) -> None:
    model = random_model(seed=5, structure=structure)
    if drafter.startswith("mapped") and structure in ("single", "zeros_q", "zeros", "disjoint"):
        model = replace(model, draft=[table.clamp(min=-30.0) for table in model.draft])
    for dtype in (torch.float64, torch.float32) if structure in ("zeros", "equal") else (torch.float64,):
        assert is_lossless(problem_of(model, DRAFTERS[drafter](model, dtype), SAMPLING["unit"], dtype))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_distribution_survives_ragged_lengths(drafter: str) -> None:
    model = random_model(seed=8)
    ragged = with_lengths(DRAFTERS[drafter](model, torch.float64), by_prefix)
    assert is_lossless(problem_of(model, ragged, SAMPLING["all"], torch.float64))


@pytest.mark.parametrize("drafter", ["one_hot", "dense_probs", "dense_logits", "sparse"])
def test_longer_drafts_and_wider_vocabulary(drafter: str) -> None:
    model = random_model(seed=11, vocab_size=5, num_drafts=3)
    assert is_lossless(problem_of(model, DRAFTERS[drafter](model, torch.float32), SAMPLING["all"], torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "sampling"), [*((name, "all") for name in DRAFTERS), ("dense_probs", "unit")])
def test_reference_follows_target_distribution(drafter: str, sampling: str) -> None:
    model = random_model(seed=2, vocab_size=3)
    ragged = with_lengths(DRAFTERS[drafter](model, torch.float64), by_prefix)
    problem = problem_of(model, ragged, SAMPLING[sampling], torch.float64)
    assert exact_distribution(reference.verify, problem, num_iterations=44).total_variation <= DOUBLE_TOLERANCE


def test_greedy_rows_follow_the_argmax_chain() -> None:
    model = random_model(seed=1, structure="ties")
    for all_greedy in (True, False):
        problem = problem_of(
            model, DRAFTERS["dense_probs"](model, torch.float32), Params(temperature=0.0), torch.float32
        )
        assert is_lossless(replace(problem, sampling=replace(problem.sampling, all_greedy=all_greedy)))


@pytest.mark.parametrize("drafter", ["dense_probs", "sparse", "mapped_probs"])
def test_accepted_length_matches_closed_form(drafter: str) -> None:
    model = random_model(seed=6)
    drawn = DRAFTERS[drafter](model, torch.float64)
    problem = problem_of(model, drawn, SAMPLING["unit"], torch.float64)
    expected, survives = 0.0, torch.ones((), dtype=torch.float64)
    for p, q in zip(problem.target_distributions, drawn.distributions, strict=False):
        survives = survives.unsqueeze(-1) * torch.minimum(p, q)
        expected += float(survives.sum())
    assert exact_distribution(verify, problem).expected_accepted == pytest.approx(expected, abs=1e-12)


def test_one_hot_rules_accept_equally_often() -> None:
    model = random_model(seed=9)
    coupled, standard = (
        exact_distribution(
            verify, problem_of(model, DRAFTERS[name](model, torch.float64), SAMPLING["all"], torch.float64)
        )
        for name in ("one_hot", "one_hot_probs")
    )
    assert coupled.expected_accepted == pytest.approx(standard.expected_accepted, abs=1e-12)


def test_trimming_on_the_draft_distribution_is_lossless() -> None:
    """Dropping a draft because the distribution it comes from is flat looks at the prefix alone."""
    model = random_model(seed=4)
    drawn = DRAFTERS["dense_probs"](model, torch.float64)

    def confident(drafts: Tensor) -> Tensor:
        rows = drawn.report(drafts)
        assert rows.distributions is not None
        assert rows.distributions.draft_probs is not None
        return (rows.distributions.draft_probs.amax(-1) > 0.55).long().cumprod(1).sum(1)

    lengths = confident(torch.cartesian_prod(torch.arange(4), torch.arange(4)))
    assert set(lengths.tolist()) >= {1, 2}
    assert is_lossless(problem_of(model, with_lengths(drawn, confident), SAMPLING["unit"], torch.float64))


def test_hole_within_a_draft_continues_from_the_target() -> None:
    model = random_model(seed=4)
    drawn = DRAFTERS["dense_probs"](model, torch.float64)

    def report(x: Tensor) -> DraftRows:
        rows = drawn.report(x)
        return replace(rows, token_ids=rows.token_ids.index_fill(1, torch.tensor(1), NO_PROPOSAL))

    assert is_lossless(problem_of(model, replace(drawn, report=report), SAMPLING["unit"], torch.float64))
