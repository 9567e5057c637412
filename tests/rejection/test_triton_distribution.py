"""The exact output distribution of the interpreted Triton kernels, within 2e-7 of the target's.

A proof takes some hundreds of verified requests, each tens of milliseconds. The thresholds of the torch backend say
where to look first. The first proof of a distribution runs in `.ci/run`, and all of them in `.ci/full`. Those with
filters have one draft: each kind of distribution with all filters, and each filter alone with one kind.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.rejection import verify, verify_block
from specdec.testing.rejection.exact_distribution import ExactDistribution, Problem, exact_distribution
from specdec.testing.rejection.reference import Params

from .interpreted import Verify, blockwise, each_row_once, quiet, with_tile
from .problems import DRAFTERS, SAMPLING, problem_of, random_model, with_lengths

pytestmark = quiet
TOLERANCE = 2e-7
ITERATIONS = 24


def problem(
    drafter: str, sampling: str, vocab_size: int, num_drafts: int, structure: str = "dense", ragged: bool = False
) -> Problem:
    model = random_model(3, vocab_size, num_drafts, structure)
    drawn = DRAFTERS[drafter](model, torch.float32)
    if ragged:
        drawn = with_lengths(drawn, lambda drafts: 1 + (drafts[:, 0] % 2))
    return problem_of(model, drawn, SAMPLING[sampling], torch.float32)


def distribution_through(backend: Verify, stated: Problem, plainly: Verify = verify) -> ExactDistribution:
    near = exact_distribution(plainly, stated, num_iterations=30)
    with each_row_once():
        return exact_distribution(backend, stated, ITERATIONS, near)


CASES = [("one_hot", "temperature", 3, 1), ("mapped_logits", "unit", 5, 1), ("sparse", "temperature", 5, 1)]
CASES += [("one_hot", "temperature", 3, 2), *((d, "unit", 3, 2) for d in DRAFTERS)]
CASES += [(d, "all", 3, 1) for d in DRAFTERS]
CASES += [("one_hot", "top_k", 5, 1), ("dense_probs", "top_p", 5, 1), ("dense_logits", "min_p", 5, 1)]
BLOCK_CASES = [("dense_probs", "unit", 2), ("dense_logits", "unit", 3)]  # one tile, and two that programs share
BLOCK_CASES += [("sparse", "temperature", 3), ("mapped_logits", "unit", 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "sampling", "vocab_size", "num_drafts"), CASES)
def test_kernels_follow_the_target_distribution(drafter: str, sampling: str, vocab_size: int, num_drafts: int) -> None:
    distribution = distribution_through(with_tile(4), problem(drafter, sampling, vocab_size, num_drafts))
    assert distribution.total_variation <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize(("drafter", "sampling", "vocab_size"), BLOCK_CASES)
def test_kernels_follow_the_target_distribution_by_the_block_rule(drafter: str, sampling: str, vocab_size: int) -> None:
    stated = replace(problem(drafter, sampling, vocab_size, 2), block=True)
    assert distribution_through(with_tile(2, blockwise), stated, verify_block).total_variation <= TOLERANCE


ODD_SUPPORTS = [("one_hot", structure) for structure in ("zeros_p", "disjoint", "ties")]  # q is not read
ODD_SUPPORTS += [
    (drafter, structure)
    for drafter in ("dense_probs", "dense_logits", "sparse")
    for structure in ("zeros_p", "zeros_q", "equal", "disjoint", "single", "ties")
]


@pytest.mark.full
@pytest.mark.parametrize(("drafter", "structure"), ODD_SUPPORTS)
def test_kernels_follow_the_target_distribution_over_odd_supports(drafter: str, structure: str) -> None:
    distribution = distribution_through(with_tile(2), problem(drafter, "unit", 4, 1, structure))
    assert distribution.total_variation <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["one_hot", "dense_probs", "dense_logits", "sparse"])
def test_kernels_follow_the_target_distribution_of_ragged_drafts(drafter: str) -> None:
    distribution = distribution_through(with_tile(4), problem(drafter, "unit", 3, 2, ragged=True))
    assert distribution.total_variation <= TOLERANCE


def test_a_wrong_guess_of_the_thresholds_changes_nothing() -> None:
    """The thresholds of another model are no help, and no harm."""
    stated = problem("dense_probs", "unit", 4, 2)
    elsewhere = exact_distribution(verify, problem("dense_probs", "top_k", 4, 2), num_iterations=30)
    helped = exact_distribution(verify, stated, 30, near=elsewhere)
    assert helped.total_variation <= TOLERANCE
    assert torch.allclose(helped.output, exact_distribution(verify, stated, 30).output, atol=1e-8)


def test_float64_is_as_exact_as_the_reference_on_a_device_with_kernels() -> None:
    model = random_model(3)
    stated = problem_of(model, DRAFTERS["dense_probs"](model, torch.float64), Params(), torch.float64)
    assert exact_distribution(with_tile(4, triton_backend.verify), stated, 46).total_variation <= 1e-12
