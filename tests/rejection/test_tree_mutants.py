"""What holds the verifier of trees to its specification sees every planted fault."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from specdec.core import rejection
from specdec.core.rejection import DistributionKind
from specdec.testing.rejection.reference import Params
from specdec.testing.rejection.tree_reference import TreeRule, coupled, multi_round, traversal

from .batches import Shape, random_batch
from .interpreted import quiet, with_tile
from .mutation import Mutant, mutated
from .test_trees import PARAMS, VERIFIERS, as_tree, problem
from .tree_problems import TreeBatch, verified

pytestmark = quiet
FAULTS = tomllib.loads((Path(__file__).parent / "tree_faults.toml").read_text(encoding="utf-8"))
OF_KERNELS = "kernels/"
MUTANTS = [Mutant(name, "", file, *edit) for file, edits in FAULTS.items() for name, edit in edits.items()]
TORCH_MUTANTS = [mutant for mutant in MUTANTS if not mutant.file.startswith(OF_KERNELS)]
KERNEL_MUTANTS = [mutant for mutant in MUTANTS if mutant.file.startswith(OF_KERNELS)]


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


@pytest.mark.parametrize("mutant", TORCH_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    with mutated(mutant, tmp_path) as package:
        assert next(contradictions(package), None) is not None


@cache
def batches_of_kernels() -> list[tuple[TreeRule, TreeBatch]]:
    """Few requests: an interpreted program takes tens of milliseconds."""
    settings: dict[str, Any] = {"dtype": torch.float32, "eps": 1e-6}
    unit, sparse = PARAMS["unit"], DistributionKind.SPARSE
    return [
        (traversal, problem(59, traversal, sparse, unit, most=14, **settings)),
        (multi_round, problem(48, multi_round, sparse, unit, most=14, **settings)),
        (coupled, problem(43, coupled, DistributionKind.ONE_HOT, unit, most=48, **settings)),
    ]


def kernels_contradict(package: ModuleType) -> bool:
    """Whether the kernels of trees and the specification differ in a decision."""
    backend = importlib.import_module(f"{package.__package__.rpartition('.')[0]}.kernels.cuda.verification")
    return any(
        verified(batch, with_tile(4, partial(backend.verify, together=rule is traversal))) != batch.expected
        for rule, batch in batches_of_kernels()
    )


@pytest.mark.full
def test_the_kernels_themselves_contradict_nothing() -> None:
    assert not kernels_contradict(rejection)


@pytest.mark.full
@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_planted_in_a_kernel_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    with mutated(mutant, tmp_path) as package:
        assert kernels_contradict(package)
