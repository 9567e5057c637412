"""The Triton kernel of trees, interpreted, decides as the specification does, and gives what the torch form gives.

The decisions are those of `test_trees.py`, on trees of all shapes: with uniforms within 1e-6 of both ends of the
interval that gives each of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.rejection import DistributionKind, DraftRows, verify
from specdec.core.rejection.tree import verify_trees
from specdec.testing.rejection.tree_reference import TreeRule, coupled, traversal

from .batches import Batch, Shape, equal, random_batch
from .interpreted import Verify, poisoned, quiet, with_tile
from .test_trees import DRAWN, PARAMS, RULES, as_tree, problem
from .tree_problems import TreeBatch, verified

pytestmark = quiet
ONE_HOT = DistributionKind.ONE_HOT


def kernel(tile: int, *, together: bool = False) -> Verify:
    return with_tile(tile, partial(triton_backend.verify, together=together))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("unit", 12),
        ("greedy", 4),
        pytest.param("top_p", 3, marks=pytest.mark.slow),
        pytest.param("cold", 100, marks=pytest.mark.full),
        pytest.param("top_k", 16, marks=pytest.mark.full),
    ],
)
def test_every_decision_on_one_hot_trees_is_the_specifications(name: str, most: int) -> None:
    batch = problem(31, coupled, ONE_HOT, PARAMS[name], dtype=torch.float32, eps=1e-6, most=most)
    assert verified(batch, kernel(4)) == batch.expected


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (DistributionKind.SPARSE, 4),
        *(pytest.param(kind, 12, marks=pytest.mark.slow) for kind in DRAWN),
        *(pytest.param(kind, 100, marks=pytest.mark.full) for kind in DRAWN),
    ],
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_decision_on_drawn_trees_is_the_specifications(rule: TreeRule, kind: DistributionKind, most: int) -> None:
    batch = problem(32, rule, kind, PARAMS["unit"], dtype=torch.float32, eps=1e-6, most=most)
    assert verified(batch, kernel(4, together=rule is traversal)) == batch.expected


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["unit", "top_k"])
def test_every_decision_with_replacement_is_the_specifications(rule: TreeRule, name: str) -> None:
    most = 12 if name == "unit" else 2
    kind = DistributionKind.SPARSE if name == "unit" else DistributionKind.DENSE_PROBS
    batch = problem(34, rule, kind, PARAMS[name], replacement=True, dtype=torch.float32, eps=1e-6, most=most)
    assert verified(batch, kernel(2, together=rule is traversal)) == batch.expected


def arguments(batch: Batch | TreeBatch) -> tuple:
    return batch.logits, batch.cu_rows, batch.drafts, batch.sampling


def bushy(batch: Batch, seed: int) -> Batch:
    """The same drafts as trees of random shapes, every third of them a chain."""
    generator = torch.Generator().manual_seed(seed)
    count, width = batch.drafts.token_ids.shape
    parents = torch.stack([torch.randint(-1, i, (count,), generator=generator) for i in range(width)], 1)
    parents[::3] = torch.arange(-1, width - 1)
    return replace(batch, drafts=replace(batch.drafts, parents=parents))


def likely(batch: Batch) -> Batch:
    """Nodes with a token of the target at their parent, so that paths are long."""
    token_ids = batch.drafts.token_ids.clone()
    for b in range(batch.num_requests):
        for node in range(int(batch.drafts.lengths[b])):
            row = batch.rows(b)[int(batch.drafts.parents[b, node]) + 1]
            earlier = (batch.drafts.parents[b, :node] == batch.drafts.parents[b, node]).sum()
            token_ids[b, node] = row.argsort(descending=True)[earlier]
    return replace(batch, drafts=replace(batch.drafts, token_ids=token_ids))


SHAPES = {
    "plain": (Shape(kinds=(ONE_HOT,), filters=False, vocab_size=40, num_drafts=6, holes=False), torch.bfloat16, 16),
    "filtered": (Shape(kinds=(ONE_HOT,), vocab_size=11, num_drafts=3, holes=False), torch.bfloat16, 4),
    "greedy": (Shape(kinds=(ONE_HOT,), greedy=1.0, filters=False, num_drafts=4, holes=False), torch.float16, 4),
    "holes": (Shape(kinds=(ONE_HOT,), filters=False, num_drafts=4), torch.float32, 16),
}


SLICED = [pytest.param(name, marks=pytest.mark.slow) if name == "filtered" else name for name in SHAPES]
"""An interpreted filter takes a second for each row."""


def random_trees(name: str, seed: int, num_requests: int = 4) -> tuple[Batch, int]:
    shape, dtype, tile = SHAPES[name]
    return likely(bushy(random_batch(seed, replace(shape, num_requests=num_requests, dtype=dtype)), seed)), tile


@pytest.mark.parametrize("name", SLICED)
def test_random_trees_and_chains_give_the_verdict_of_the_torch_form(name: str) -> None:
    """Ragged, with requests without rows, and with the random numbers of the requests' seeds."""
    deepest = 0
    for seed in (1, 2):
        batch, tile = random_trees(name, seed)
        found = kernel(tile)(*arguments(batch))
        expected = verify_trees(*arguments(batch), together=False)
        if not batch.sampling.all_greedy:
            assert equal(found, expected)
        assert found.output_ids.equal(expected.output_ids)
        assert found.path is not None
        assert found.path.equal(expected.path)
        deepest = max(deepest, int(found.num_accepted.max()))
    assert deepest > 1


@pytest.mark.parametrize("together", [False, True], ids=["in turn", "together"])
@pytest.mark.parametrize("tile", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_trees_of_every_kind_beside_each_other_give_the_verdict_of_the_torch_form(tile: int, *, together: bool) -> None:
    """One-hot, dense, sparse and greedy requests with the random numbers of their seeds: drawn, or so reported."""
    deepest = 0
    for seed in (1, 2):
        batch = bushy(random_batch(seed, Shape(num_requests=5, num_drafts=4, filters=False, holes=False)), seed)
        found = kernel(tile, together=together)(*arguments(batch))
        expected = verify_trees(*arguments(batch), together=together)
        assert equal(found, expected)
        assert torch.equal(found.path, expected.path)
        deepest = max(deepest, int(found.num_accepted.max()))
    assert deepest > 1


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_random_trees_give_the_verdict_of_the_torch_form(name: str, seed: int) -> None:
    batch, tile = random_trees(name, seed, num_requests=6 if name == "filtered" else 24)
    found, expected = kernel(tile)(*arguments(batch)), verify_trees(*arguments(batch), together=False)
    assert found.output_ids.equal(expected.output_ids)
    assert found.path.equal(expected.path)


def test_a_chain_as_a_tree_gives_what_the_kernel_of_chains_gives() -> None:
    batch = random_batch(3, Shape(kinds=(ONE_HOT,), num_requests=4, holes=False, filters=False))
    chain = with_tile(4)(*arguments(batch))
    tree = kernel(4)(*arguments(replace(batch, drafts=as_tree(batch.drafts))))
    assert torch.equal(chain.output_ids, tree.output_ids)
    assert torch.equal(chain.num_accepted, tree.num_accepted)


def test_a_bad_row_accepts_nothing_below_it() -> None:
    batch = problem(33, coupled, ONE_HOT, PARAMS["unit"], dtype=torch.float32, most=3)
    batch.logits[batch.cu_rows[:-1]] = torch.nan
    found, expected = (rule(*arguments(batch), batch.uniforms) for rule in (kernel(4), verify))
    assert not found.num_accepted.any()
    assert equal(found, expected)


def parents_of_nowhere(drafts: DraftRows) -> Tensor:
    return torch.arange(drafts.token_ids.shape[1]).expand_as(drafts.token_ids).contiguous()


def test_nodes_that_hang_from_themselves_are_never_met() -> None:
    batch, tile = random_trees("plain", 4, num_requests=2)
    batch = replace(batch, drafts=replace(batch.drafts, parents=parents_of_nowhere(batch.drafts)))
    assert not kernel(tile)(*arguments(batch)).num_accepted.any()


def test_the_workspace_is_used_again_without_a_trace() -> None:
    batch, tile = random_trees("plain", 5, num_requests=3)
    workspace = triton_backend.Workspace.plan(4, 8, 40, torch.device("cpu"), tile=tile)
    rule = partial(triton_backend.verify, together=False)
    first = rule(*arguments(batch), None, poisoned(workspace))
    kept = replace(first, **{k: v.clone() for k, v in vars(first).items() if isinstance(v, Tensor)})
    assert equal(rule(*arguments(batch), None, poisoned(workspace)), kept)
