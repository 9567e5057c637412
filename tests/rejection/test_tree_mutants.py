"""What holds the verifier of trees to its specification sees every planted fault."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specdec.core import rejection
from specdec.core.rejection import DistributionKind
from specdec.testing.rejection.reference import Params
from specdec.testing.rejection.tree_reference import coupled, multi_round, traversal

from .batches import Shape, random_batch
from .mutation import Mutant, mutated
from .test_trees import PARAMS, VERIFIERS, as_tree, problem, verified
from .tree_problems import TreeBatch

WALK, TREE, UNIFORMS = "rejection/drawn_tree.py", "rejection/tree.py", "rejection/uniforms.py"
FAULTS = [
    ("a_residual_of_mass_one", WALK, "left.div_(rest.to(left.dtype).unsqueeze(1))", "left.div_(mass.unsqueeze(1))"),
    ("a_weight_of_m_over_m_plus_one", WALK, "rest = mass + (1.0 - weight)", "rest = mass + 1.0"),
    ("a_later_child_with_the_first_weight", WALK, "walk.weights[-1] = weight if mass > 0 else 0.0", "pass"),
    (
        "siblings_with_the_whole_distribution",
        WALK,
        "if walk.tried[-1] and not (self._repl",
        "if False and not (self._repl",
    ),
    ("replacement_ignored", WALK, "and not (self._replacement and", "and not (False and"),
    ("siblings_not_renormalised", WALK, "given[i] /= given[i].sum(dtype=torch.float64)", "pass"),
    ("a_child_weight_above_one", WALK, "accept = min(1.0, p / q) if p > 0", "accept = p / q if p > 0"),
    ("nothing_subtracted", WALK, "left[:, :vocab_size] -= given", "left[:, :vocab_size] -= 0.0"),
    ("a_child_that_forgets_its_weight", WALK, ".mul_(weights.unsqueeze(1))", ".mul_(1.0)"),
    (
        "the_distribution_of_the_parent_place",
        WALK,
        "places = torch.tensor([active[i].path[-1] for i in chosen]",
        "places = torch.tensor([active[i].path[-2:][0] for i in chosen]",
    ),
    ("one_uniform_for_all_nodes_together", WALK, "[walk.request][node] < walk", "[walk.request][0] < walk"),
    ("one_uniform_for_all_nodes_in_turn", WALK, "[walk.request][node] * q", "[walk.request][0] * q"),
    ("p_instead_of_the_residual", WALK, "if walk.mass[-1] > 0]", "if walk.mass[-1] > 2]"),
    ("the_output_uniform_of_the_root", WALK, "[walks[i].path[-1] for i in drawn]]", "[0 for i in drawn]]"),
    ("a_child_that_keeps_the_residual_of_its_place", WALK, "if not walk.tried[-1]]", "if len(walk.path) == 1]"),
    (
        "the_target_token_of_the_root",
        TREE,
        "tree.child_with(place, tokens[place])",
        "tree.child_with(place, tokens[0])",
    ),
    ("the_last_token_of_the_root", TREE, "token=tokens[b][ending.path[-1]]", "token=tokens[b][0]"),
    ("an_output_uniform_by_place", UNIFORMS, "first + depths, Stream.RESAMPLE", "first + 0 * depths, Stream.RESAMPLE"),
    ("other_numbers_than_a_chain", UNIFORMS, "turn = torch.where(depths[:, 1:] == turn, 0, turn)", "pass"),
]
MUTANTS = [Mutant(name, "", file, before, after) for name, file, before, after in FAULTS]


@cache
def batches() -> list[tuple[str, TreeBatch]]:
    unit = PARAMS["unit"]
    dense, sparse = DistributionKind.DENSE_PROBS, DistributionKind.SPARSE
    return [
        *(
            (VERIFIERS[rule], problem(seed, rule, dense, unit))
            for rule in (multi_round, traversal)
            for seed in (21, 22)
        ),
        *((VERIFIERS[rule], problem(23, rule, sparse, unit, replacement=True)) for rule in (multi_round, traversal)),
        ("verify", problem(24, coupled, DistributionKind.ONE_HOT, Params(top_k=2))),
    ]


def contradictions(package: ModuleType) -> Iterator[str]:
    """Where a verifier and its specification differ."""
    for name, batch in batches():
        if verified(batch, getattr(package, name)) != batch.expected:
            yield f"{name}: a decision"
    for name in ("verify", "verify_block"):
        chains = random_batch(1, Shape(num_requests=128, num_drafts=4, holes=False, dtype=torch.float64))
        given = (chains.logits, chains.cu_rows)
        expected = getattr(rejection, name)(*given, chains.drafts, chains.sampling)
        found = getattr(package, name)(*given, as_tree(chains.drafts), chains.sampling)
        if not torch.equal(expected.output_ids, found.output_ids):
            yield f"{name}: a chain"


def test_the_verifier_itself_contradicts_nothing() -> None:
    assert not list(contradictions(rejection))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    with mutated(mutant, tmp_path) as package:
        assert next(contradictions(package), None) is not None
