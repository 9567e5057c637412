"""Distributions with an id twice, greedy requests that report a distribution, holes before drafts with a
distribution: every backend agrees.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.rejection import DistributionKind, DraftDistributions, DraftRows, Uniforms, verify, verify_block
from specdec.testing.rejection import reference
from specdec.testing.rejection.block_reference import verify_block_request
from specdec.testing.rejection.reference import Params, _step

from .batches import Batch, Shape, block_uniforms, equal, random_batch
from .interpreted import Verify, blockwise, quiet, with_tile
from .problems import sampling_rows

DOUBLE = torch.float64
RULES = {"standard": verify, "block": verify_block}
KERNELS = {"standard": triton_backend.verify, "block": blockwise}


def merged(distributions: DraftDistributions, vocab_size: int) -> DraftDistributions:
    """The same distribution as dense probabilities: what occurs twice is added up."""
    assert distributions.sparse_ids is not None
    assert distributions.sparse_probs is not None
    table = torch.zeros(*distributions.sparse_ids.shape[:2], vocab_size).scatter_add(
        2, distributions.sparse_ids, distributions.sparse_probs
    )
    return DraftDistributions(kind=torch.full_like(distributions.kind, DistributionKind.DENSE_PROBS), draft_probs=table)


def twice(seed: int) -> Batch:
    """Eight requests of one draft each, which is in its distribution twice; another id is there three times."""
    batch = random_batch(
        seed, Shape(8, 1, 24, kinds=(DistributionKind.SPARSE,), filters=False, greedy=0, idle=0, holes=False)
    )
    token_ids, lengths = batch.drafts.token_ids.clamp(min=0), torch.ones_like(batch.drafts.lengths)
    other = (token_ids + 5) % 24
    ids = torch.stack([token_ids, other, (token_ids + 9) % 24, token_ids, other, other], 2)
    probs = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)).softmax(2)
    logits = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed))
    logits[0::2].scatter_add_(1, token_ids, torch.full((8, 1), 2.5))
    distributions = DraftDistributions(
        kind=torch.full((8,), DistributionKind.SPARSE, dtype=torch.uint8), sparse_ids=ids, sparse_probs=probs
    )
    return replace(
        batch, logits=logits, cu_rows=2 * torch.arange(9), drafts=DraftRows(token_ids, lengths, distributions)
    )


@quiet
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(2))
def test_an_id_that_a_sparse_distribution_names_twice_has_the_sum_of_its_probabilities(seed: int, rule: str) -> None:
    batch = twice(seed)
    assert batch.drafts.distributions is not None
    arguments = (batch.logits, batch.cu_rows)
    dense = replace(batch.drafts, distributions=merged(batch.drafts.distributions, 24))
    want = RULES[rule](*arguments, dense, batch.sampling)
    assert 0 < int(want.num_accepted.sum()) < 8
    assert equal(RULES[rule](*arguments, batch.drafts, batch.sampling), want)
    assert equal(with_tile(8, KERNELS[rule])(*arguments, batch.drafts, batch.sampling), want)
    if rule == "standard":
        assert equal(reference.verify(*arguments, batch.drafts, batch.sampling), want)


def test_sparse_ids_outside_the_vocabulary_are_left_out_by_every_backend() -> None:
    """The specification indexed beyond its table where the others go on."""
    batch = twice(3)
    distributions = batch.drafts.distributions
    assert distributions is not None
    assert distributions.sparse_ids is not None
    far = replace(distributions, sparse_ids=distributions.sparse_ids.index_fill(2, torch.tensor([1, 4]), 10**6))
    drafts = replace(batch.drafts, distributions=far)
    want = reference.verify(batch.logits, batch.cu_rows, drafts, batch.sampling)
    assert equal(verify(batch.logits, batch.cu_rows, drafts, batch.sampling), want)


def beside(draft: int, accept: float) -> tuple[torch.Tensor, torch.Tensor, DraftRows, object, Uniforms]:
    """A greedy request with a tie for its maximum, and a sampled one; both report a distribution for the same draft."""
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0]] * 4)
    distributions = DraftDistributions(
        kind=torch.full((2,), DistributionKind.DENSE_PROBS, dtype=torch.uint8), draft_probs=torch.full((2, 1, 4), 0.25)
    )
    drafts = DraftRows(torch.tensor([[draft]] * 2), torch.tensor([1, 1]), distributions)
    uniforms = Uniforms(torch.full((2, 2), 0.6, dtype=DOUBLE), torch.full((2, 1), accept, dtype=DOUBLE))
    return logits, torch.tensor([0, 2, 4]), drafts, sampling_rows([Params(temperature=0), Params()]), uniforms


@quiet
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("accept", [0.01, 0.99])
def test_a_greedy_request_takes_the_first_of_equal_maxima_whatever_distribution_it_reports(
    rule: str, accept: float
) -> None:
    for draft, expected in ((1, [1, 1]), (2, [1, -1])):
        for function in (RULES[rule], with_tile(4, KERNELS[rule])):
            verdict = function(*beside(draft, accept))
            assert verdict.output_ids[0].tolist() == expected


HOLED = Shape(
    8, 4, 9, kinds=(DistributionKind.DENSE_PROBS, DistributionKind.SPARSE), filters=False, greedy=0, idle=0, holes=False
)


def with_hole(seed: int, place: int) -> tuple[Batch, Batch]:
    """A batch whose every draft has a hole at the place, and the same cut short there."""
    batch = random_batch(seed, HOLED)
    drafts, hole = batch.drafts, torch.arange(4) == place
    holed = replace(drafts, token_ids=drafts.token_ids.masked_fill(hole, -1))
    rows = [batch.rows(b)[: place + 1] for b in range(8)]
    cu_rows = torch.tensor([0, *map(len, rows)]).cumsum(0)
    cut = replace(drafts, lengths=drafts.lengths.clamp(max=place))
    return replace(batch, drafts=holed), replace(batch, logits=torch.cat(rows), cu_rows=cu_rows, drafts=cut)


def check_hole(function: Verify, seed: int, place: int) -> None:
    holed, cut = with_hole(seed, place)
    got = function(holed.logits, holed.cu_rows, holed.drafts, holed.sampling)
    want = verify_block(cut.logits, cut.cu_rows, cut.drafts, cut.sampling)
    assert torch.equal(got.output_ids, want.output_ids)
    uniforms = block_uniforms(holed.drafts, holed.sampling)
    assert uniforms.accept is not None
    for b, length in enumerate(holed.drafts.lengths.tolist()):
        rows = holed.rows(b).double()
        steps = [_step(row, b, i, holed.drafts, holed.sampling, uniforms) for i, row in enumerate(rows)]
        drafts = holed.drafts.token_ids[b, :length].tolist()
        written = verify_block_request(steps, drafts, uniforms.accept[b].tolist())
        assert [token for token in got.output_ids[b].tolist() if token >= 0] == written


@pytest.mark.parametrize("place", range(4))
def test_a_hole_ends_the_block_as_the_end_of_the_draft_does(place: int) -> None:
    for seed in range(4):
        check_hole(verify_block, seed, place)


@quiet
def test_a_hole_ends_the_block_in_the_kernels_too() -> None:
    check_hole(with_tile(8, blockwise), 2, 1)
