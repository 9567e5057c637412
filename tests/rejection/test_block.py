"""Block verification follows the target's distribution and accepts no fewer drafts; its known mistakes are seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.core.rejection import DistributionKind, verify, verify_block
from specdec.testing.rejection.block_reference import verify_block_request
from specdec.testing.rejection.exact_distribution import Problem, exact_distribution
from specdec.testing.rejection.reference import _step

from .batches import Shape, block_uniforms, equal, random_batch
from .mutation import Mutant, mutated
from .problems import DRAFTERS, SAMPLING, problem_of, random_model, with_lengths

DOUBLE = torch.float64
BLOCK = "rejection/drawn_tree.py"
WITH_DISTRIBUTION = ["dense_probs", "dense_logits", "sparse", "mapped_probs", "one_hot_probs"]


def block_problem(drafter: str, sampling: str, seed: int, structure: str = "dense", ragged: bool = False) -> Problem:
    model = random_model(seed, vocab_size=3, num_drafts=3, structure=structure)
    drawn = DRAFTERS[drafter](model, DOUBLE)
    if ragged:
        drawn = with_lengths(drawn, lambda drafts: 1 + drafts[:, 0])
    return replace(problem_of(model, drawn, SAMPLING[sampling], DOUBLE), block=True)


@pytest.mark.parametrize("sampling", ["unit", "all"])
@pytest.mark.parametrize("drafter", WITH_DISTRIBUTION)
def test_output_follows_target_distribution(drafter: str, sampling: str) -> None:
    assert exact_distribution(verify_block, block_problem(drafter, sampling, 3), 46).total_variation <= 1e-12


@pytest.mark.parametrize("structure", ["zeros_p", "zeros_q", "zeros", "equal", "disjoint", "ties"])
def test_distribution_survives_zeros_ties_and_disjoint_supports(structure: str) -> None:
    assert (
        exact_distribution(verify_block, block_problem("dense_probs", "unit", 5, structure), 46).total_variation
        <= 1e-12
    )


def test_distribution_survives_ragged_lengths() -> None:
    assert (
        exact_distribution(verify_block, block_problem("dense_probs", "all", 8, ragged=True), 46).total_variation
        <= 1e-12
    )


@pytest.mark.parametrize("kinds", [(DistributionKind.ONE_HOT,), tuple(DistributionKind)], ids=["one-hot", "all kinds"])
def test_uniforms_that_are_given_are_used_at_every_place(kinds: tuple[DistributionKind, ...]) -> None:
    batch = random_batch(3, Shape(kinds=kinds, greedy=0.0))
    arguments = batch.logits, batch.cu_rows, batch.drafts
    other = replace(batch.sampling, seed=batch.sampling.seed + 1)
    given = verify_block(*arguments, batch.sampling, block_uniforms(batch.drafts, other))
    assert equal(given, verify_block(*arguments, other))
    assert not equal(given, verify_block(*arguments, batch.sampling))


@pytest.mark.full
def test_block_accepts_more_than_one_at_a_time_where_a_distribution_is_known_and_as_much_where_none_is() -> None:
    for seed in range(3):
        stated = block_problem("dense_probs", "unit", seed)
        together = exact_distribution(verify_block, stated).expected_accepted
        one_by_one = exact_distribution(verify, replace(stated, block=False)).expected_accepted
        assert together > one_by_one + 1e-4
        certain = block_problem("one_hot_probs", "unit", seed)
        together = exact_distribution(verify_block, certain).expected_accepted
        assert together == pytest.approx(
            exact_distribution(verify, replace(certain, block=False)).expected_accepted, abs=1e-10
        )


def test_same_tokens_as_written_out_for_one_request() -> None:
    for seed in range(25):
        batch = random_batch(
            seed, Shape(kinds=(DistributionKind.DENSE_PROBS, DistributionKind.SPARSE), greedy=0.0, dtype=DOUBLE)
        )
        uniforms = block_uniforms(batch.drafts, batch.sampling)
        assert uniforms.accept is not None
        got = verify_block(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
        for b, length in enumerate(batch.drafts.lengths.tolist()):
            rows = batch.rows(b)
            if not len(rows):
                assert (got.output_ids[b] == -1).all()
                continue
            steps = [_step(row, b, i, batch.drafts, batch.sampling, uniforms) for i, row in enumerate(rows)]
            want = verify_block_request(steps, batch.drafts.token_ids[b, :length].tolist(), uniforms.accept[b].tolist())
            assert [token for token in got.output_ids[b].tolist() if token >= 0] == want


@pytest.mark.parametrize(
    "shape", [Shape(kinds=(DistributionKind.ONE_HOT,)), Shape(greedy=1.0)], ids=["one_hot", "greedy"]
)
def test_requests_without_a_distribution_and_greedy_ones_take_the_plain_rules(shape: Shape) -> None:
    for seed in range(10):
        batch = random_batch(seed, shape)
        got = verify_block(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
        assert equal(got, batch.verify())


def test_uniforms_of_consecutive_steps_differ_although_they_verify_the_same_position() -> None:
    batch = random_batch(1, Shape())
    later = replace(batch.sampling, position=batch.sampling.position + 1)
    now, then = (block_uniforms(batch.drafts, sampling).accept for sampling in (batch.sampling, later))
    assert now is not None
    assert then is not None
    assert not (now[:, 1:] == then[:, :-1]).any()


MUTANTS = [
    Mutant("residual_not_scaled_by_survival", "block", BLOCK, ".mul_(weights.view(-1, 1, 1))", ".mul_(1.0)"),
    Mutant("survival_not_that_of_the_block", "block", BLOCK, "p if walk.failed[-1] else p * walk.weights[-1]", "p"),
    Mutant("no_look_ahead_mass", "block", BLOCK, "walk.weights[-1] = weight_left if remains > 0 else 0.0", "pass"),
    Mutant("one_uniform_for_all_places", "block", BLOCK, "[walk.request][node] < walk", "[walk.request][0] < walk"),
    Mutant("survival_not_clipped", "block", BLOCK, "accept = min(1.0, p / q) if p > 0", "accept = p / q if p > 0"),
    Mutant("p_after_the_last_failure", "block", BLOCK, "> 1 or self._accepts(walk)", "> 1"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_of_the_block_rule_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    with mutated(mutant, tmp_path) as package:
        distributions = [
            exact_distribution(package.verify_block, block_problem("dense_probs", "unit", s), 24) for s in range(4)
        ]
        assert max(distribution.total_variation for distribution in distributions) >= 2e-5
