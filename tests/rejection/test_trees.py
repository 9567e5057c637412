"""Trees of drafts leave the target's distribution as it is: the specification exactly, and the verifier decides alike.

The specification is enumerated: every draw of every tree, every decision. The verifier is then held to each decision of
the specification, by uniforms within 1e-12 of both ends of the interval that gives it. So its distribution is within
1e-12 per decision of the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from specdec.core.kernels.philox import Stream, uniform
from specdec.core.rejection import (
    DistributionKind,
    DraftDistributions,
    DraftRows,
    SamplingRows,
    Uniforms,
    Verdict,
    sampler,
)
from specdec.core.rejection.drawn_tree import Tree
from specdec.core.rejection.uniforms import draw_tree_uniforms, draw_uniforms
from specdec.testing.rejection.reference import Params
from specdec.testing.rejection.tree_reference import TreeRule, coupled, multi_round, traversal

from .batches import Shape, random_batch
from .problems import sampling_rows, single
from .tree_problems import (
    SHAPES,
    Model,
    Sketch,
    TreeBatch,
    batch_of,
    cases,
    grown,
    likeliest,
    of_shape,
    variation,
    verified,
)

WIDEST = SHAPES[-1]
DEEP_LEFT = [-1, -1, 0, 0]
PARAMS = {
    "unit": Params(),
    "cold": Params(temperature=single(1 / 3)),
    "top_k": Params(top_k=2),
    "top_p": Params(top_p=0.8),
    "greedy": Params(temperature=0.0),
}
RULES = {"multi_round": multi_round, "traversal": traversal}


def pair(seed: int, params: Params | None = None) -> tuple[Model, Model]:
    return Model(10 * seed, params or Params()), Model(10 * seed + 1)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", [[-1], [-1, -1], [-1, 0], DEEP_LEFT], ids=str)
def test_a_drawn_tree_leaves_the_distribution_as_it_is(rule: TreeRule, shape: list[int]) -> None:
    target, draft = pair(1)
    assert variation(rule, grown(draft, of_shape(shape)), target) <= 1e-12


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_trees_of_every_shape_leave_every_distribution_as_it_is(rule: TreeRule, name: str, replacement: bool) -> None:
    for shape in SHAPES:
        target, draft = pair(2, PARAMS[name])
        assert variation(rule, grown(draft, of_shape(shape), replacement=replacement), target) <= 1e-12, shape


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_siblings_drawn_with_replacement_are_lossless_too(rule: TreeRule) -> None:
    target, draft = pair(3, PARAMS["top_k"])
    assert variation(rule, grown(draft, of_shape([-1, -1, 0]), replacement=True), target) <= 1e-12


def second_if_first_was_unlikely(draft: Model) -> Callable[[Sketch], int | None]:
    """Looks at what was drawn, before it decides where to draw the next node."""

    def place(sketch: Sketch) -> int | None:
        drawn = sketch.token_ids
        if not drawn:
            return 0
        if len(drawn) == 1 and draft([])[drawn[0]] < 0.5:
            return 0
        return 1 if len(drawn) < 3 else None

    return place


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_growth_may_look_at_what_was_drawn_before(rule: TreeRule) -> None:
    target, draft = pair(4)
    assert variation(rule, grown(draft, second_if_first_was_unlikely(draft)), target) <= 1e-12


@pytest.mark.parametrize("count", [0, 1, 3])
def test_any_prefix_of_a_tree_is_lossless(count: int) -> None:
    target, draft = pair(5)

    def cut() -> Iterator[tuple[Sketch, float]]:
        for sketch, prob in grown(draft, of_shape(DEEP_LEFT)):
            yield Sketch(sketch.parents[:count], sketch.token_ids[:count], sketch.q[:count]), prob

    assert variation(traversal, cut(), target) <= 1e-12


def pruned(draft: Model) -> Iterator[tuple[Sketch, float]]:
    """Drops a last node that it finds unlikely, after it drew it."""
    for sketch, prob in grown(draft, of_shape([-1, -1])):
        kept = 2 if draft([])[sketch.token_ids[1]] >= draft([]).median() else 1
        yield Sketch(sketch.parents[:kept], sketch.token_ids[:kept], sketch.q[:kept]), prob


def merged_twins(draft: Model) -> Iterator[tuple[Sketch, float]]:
    for sketch, prob in grown(draft, of_shape([-1, -1]), replacement=True):
        kept = len(set(sketch.token_ids))
        yield Sketch(sketch.parents[:kept], sketch.token_ids[:kept], sketch.q[:kept]), prob


@pytest.mark.parametrize("drafter", [pruned, merged_twins])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_proof_sees_drafters_that_drop_what_they_drew(rule: TreeRule, drafter: Callable) -> None:
    found = [variation(rule, drafter(draft), target) for target, draft in map(pair, range(20, 26))]
    assert max(found) > 1e-4


@pytest.mark.parametrize("rule", [coupled, multi_round, traversal])
def test_one_hot_trees_have_one_rule(rule: TreeRule) -> None:
    target, draft = pair(6)
    assert variation(rule, iter([likeliest(draft, WIDEST)]), target) <= 1e-12


# The verifier against the specification.


def problem(
    seed: int,
    rule: TreeRule,
    kind: DistributionKind,
    params: Params,
    *,
    replacement: bool = False,
    dtype: torch.dtype = torch.float64,
    eps: float = 1e-12,
    most: int = 250,
) -> TreeBatch:
    """Trees of all shapes in one ragged batch, with uniforms at the ends of the decisions of a rule."""
    target, draft = pair(seed, params)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in SHAPES:
        sketches = [sketch for sketch, _ in grown(draft, of_shape(shape), replacement=replacement)]
        for number in torch.randperm(len(sketches), generator=generator)[:4].tolist():
            each = sketches[number]
            found += [(each, case) for case in cases(rule, each.nodes(target), eps)]
    chosen = torch.randperm(len(found), generator=generator)[:most].tolist()
    return batch_of([found[i] for i in chosen], target, draft, kind, replacement=replacement, dtype=dtype)


VERIFIERS = {multi_round: "verify", traversal: "verify_block", coupled: "verify"}
DRAWN = [
    DistributionKind.DENSE_PROBS,
    DistributionKind.DENSE_LOGITS,
    DistributionKind.SPARSE,
]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("kind", DRAWN, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["unit", "top_k"])
def test_every_decision_is_the_specifications(rule: TreeRule, kind: DistributionKind, name: str) -> None:
    batch = problem(11, rule, kind, PARAMS[name])
    assert verified(batch, getattr(sampler, VERIFIERS[rule])) == batch.expected


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_decision_with_replacement_is_the_specifications(rule: TreeRule) -> None:
    batch = problem(12, rule, DistributionKind.SPARSE, PARAMS["unit"], replacement=True)
    assert verified(batch, getattr(sampler, VERIFIERS[rule])) == batch.expected


@pytest.mark.parametrize("name", ["verify", "verify_block"])
@pytest.mark.parametrize("params", ["unit", "top_p", "greedy"])
def test_one_hot_trees_follow_the_targets_token(name: str, params: str) -> None:
    batch = problem(14, coupled, DistributionKind.ONE_HOT, PARAMS[params])
    assert verified(batch, getattr(sampler, name)) == batch.expected


def as_tree(drafts: DraftRows) -> DraftRows:
    parents = torch.arange(-1, drafts.token_ids.shape[1] - 1).expand_as(drafts.token_ids)
    return replace(drafts, parents=parents)


@pytest.mark.parametrize("name", ["verify", "verify_block"])
@pytest.mark.parametrize("seed", range(4))
def test_a_chain_as_a_tree_gives_the_ids_of_a_chain(name: str, seed: int) -> None:
    shape = Shape(num_requests=24, num_drafts=4, holes=False, dtype=torch.float64)
    batch = random_batch(seed, shape)
    verify = getattr(sampler, name)
    chain = verify(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
    tree = verify(batch.logits, batch.cu_rows, as_tree(batch.drafts), batch.sampling)
    for field in ("output_ids", "num_accepted", "status"):
        assert torch.equal(getattr(chain, field), getattr(tree, field)), field


def test_a_greedy_batch_is_walked_alike() -> None:
    batch = problem(15, coupled, DistributionKind.ONE_HOT, PARAMS["greedy"])
    on_host = sampler.verify(
        batch.logits, batch.cu_rows, batch.drafts, replace(batch.sampling, all_greedy=True), batch.uniforms
    )
    other = sampler.verify(batch.logits, batch.cu_rows, batch.drafts, batch.sampling, batch.uniforms)
    for field in ("output_ids", "num_accepted", "status", "path"):
        assert torch.equal(getattr(on_host, field), getattr(other, field)), field
    assert on_host.on_host is not None
    assert [row[2:] for row in on_host.on_host] == on_host.output_ids.tolist()


def test_uniforms_of_nodes_never_meet_twice() -> None:
    """Within a step, and between a step and the next one, whose position is at most one path further."""
    parents = [-1, -1, 0, 0, 2, 1]
    depths = torch.tensor([[0, 1, 1, 2, 2, 3, 2]])
    drafts = DraftRows(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([6]), parents=torch.tensor([parents]))
    batch = random_batch(0, Shape(num_requests=1, num_drafts=6, idle=0))
    drafts = replace(drafts, distributions=batch.drafts.distributions)
    for together in (True, False):
        first = draw_tree_uniforms(drafts, batch.sampling, depths, together=together)
        later = replace(batch.sampling, position=batch.sampling.position + 1)  # nothing was accepted
        second = draw_tree_uniforms(drafts, later, depths, together=together)
        assert first.accept is not None
        assert second.accept is not None
        every = [*first.accept[0].tolist(), *second.accept[0].tolist()]
        fresh = len(set(every))
        assert fresh == 12, "a number is used for two nodes"
        expected = uniform(batch.sampling.seed, batch.sampling.position + depths[0], Stream.RESAMPLE)
        assert torch.equal(first.output[0], expected)


def test_a_bad_row_accepts_nothing_below_it() -> None:
    batch = problem(16, traversal, DistributionKind.DENSE_PROBS, PARAMS["unit"])
    logits = batch.logits.clone()
    logits[batch.cu_rows[:-1]] = torch.nan
    for verify in (sampler.verify, sampler.verify_block):
        verdict = verify(logits, batch.cu_rows, batch.drafts, batch.sampling, batch.uniforms)
        assert not verdict.num_accepted.any()
        assert bool(verdict.status.all())


def test_a_bad_leaf_changes_no_path_that_ends_elsewhere() -> None:
    batch = problem(16, traversal, DistributionKind.DENSE_PROBS, PARAMS["unit"])
    logits = batch.logits.clone()
    logits[batch.cu_rows[1:] - 1] = torch.nan  # of each request's last node, which has no children
    for verify in (sampler.verify, sampler.verify_block):
        sound, spoilt = (verify(each, batch.cu_rows, *batch_of_rows(batch)) for each in (batch.logits, logits))
        elsewhere = (sound.path == batch.drafts.lengths[:, None]).logical_not().all(1)
        assert bool((sound.num_accepted[elsewhere] > 0).any())
        assert torch.equal(sound.path[elsewhere], spoilt.path[elsewhere])
        assert torch.equal(sound.output_ids[elsewhere], spoilt.output_ids[elsewhere])


def batch_of_rows(batch: TreeBatch) -> tuple[DraftRows, SamplingRows, Uniforms]:
    return batch.drafts, batch.sampling, batch.uniforms


@pytest.mark.parametrize("outside", [-7, 1000])
def test_an_id_outside_the_vocabulary_is_accepted_nowhere_in_a_drawn_tree(outside: int) -> None:
    """Not even where the nearest token is as certain as can be."""
    vocab_size, nearest = 3, 0 if outside < 0 else 2
    logits = torch.full((3, vocab_size), -40.0)
    logits[:, nearest] = 40.0
    drafts = DraftRows(torch.tensor([[outside, outside]]), torch.tensor([2]), parents=torch.tensor([[-1, -1]]))
    probs = torch.full((1, 2, vocab_size), 1 / vocab_size)
    kinds = torch.tensor([int(DistributionKind.DENSE_PROBS)], dtype=torch.uint8)
    drafts = replace(drafts, distributions=DraftDistributions(kinds, draft_probs=probs))
    one, none = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    sampling = SamplingRows(one, none, one, 0 * one, none, none, all_greedy=False, any_filter=False)
    for verify in (sampler.verify, sampler.verify_block):
        verdict = verify(logits, torch.tensor([0, 3]), drafts, sampling)
        assert int(verdict.num_accepted) == 0
        assert int(verdict.output_ids[0, 0]) == nearest


def test_a_chain_as_a_tree_has_the_uniforms_of_a_chain() -> None:
    batch = random_batch(0, Shape(num_requests=2, num_drafts=3, idle=0))
    depths = torch.arange(4).expand(2, 4)
    plain = draw_uniforms(batch.drafts, batch.sampling)
    seeds, positions = batch.sampling.seed.unsqueeze(1), batch.sampling.position.unsqueeze(1) + torch.arange(3)
    told_apart = uniform(seeds, positions, Stream.ACCEPT, torch.arange(1, 4))
    for together, accept in ((False, plain.accept), (True, told_apart)):
        found = draw_tree_uniforms(batch.drafts, batch.sampling, depths, together=together)
        assert accept is not None
        assert found.accept is not None
        assert torch.equal(found.accept, accept)
        assert torch.equal(found.output, plain.output)


def test_on_a_chain_a_node_is_told_apart_by_its_position_alone() -> None:
    kind = torch.full((2,), DistributionKind.DENSE_PROBS, dtype=torch.uint8)
    drafts = DraftRows(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), DraftDistributions(kind))
    arguments = drafts, sampling_rows([Params()] * 2)
    found = draw_tree_uniforms(*arguments, torch.arange(4).expand(2, 4), together=False)
    expected = draw_uniforms(*arguments)
    assert found.accept is not None
    assert expected.accept is not None
    assert torch.equal(found.accept, expected.accept)
    assert torch.equal(found.output, expected.output)


def test_below_a_bad_place_there_is_no_child() -> None:
    tree = Tree.of([5, 6, 7], [-1, 0, -1])
    assert tree.without([False, True, False, False]).children == [[0, 2], [], [], []]
    assert tree.without([False] * 4) is tree


@pytest.mark.parametrize("function", [sampler.verify, sampler.verify_block], ids=["one by one", "together"])
@pytest.mark.parametrize(
    ("token", "accept", "expected"), [(0, 0.5 - 1e-9, 1), (0, 0.5, 0), (-2, 1e-9, 0), (4, 1e-9, 0)]
)
def test_a_node_is_accepted_below_its_weight_and_no_token_of_another_vocabulary_is(
    function: Callable[..., Verdict], token: int, accept: float, expected: int
) -> None:
    """p gives each of four tokens 1/4, and q the first and the last 1/2."""
    kind = torch.tensor([DistributionKind.DENSE_PROBS], dtype=torch.uint8)
    drawn_from = DraftDistributions(kind, draft_probs=torch.tensor([[[0.5, 0.0, 0.0, 0.5]]]))
    drafts = DraftRows(torch.tensor([[token]]), torch.tensor([1]), drawn_from, parents=torch.tensor([[-1]]))
    uniforms = Uniforms(torch.full((1, 2), 0.3, dtype=torch.float64), torch.tensor([[accept]], dtype=torch.float64))
    verdict = function(torch.zeros(2, 4), torch.tensor([0, 2]), drafts, sampling_rows([Params()]), uniforms)
    assert verdict.num_accepted.tolist() == [expected]
