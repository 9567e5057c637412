"""Rows with NaN, infinities or no survivor: a valid token, a status bit, and no harm to the neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specdec.core.rejection import (
    STATUS_BAD_ROW,
    STATUS_EMPTY_RESIDUAL,
    DistributionKind,
    DraftDistributions,
    DraftRows,
    Uniforms,
    Verdict,
    sample,
    verify,
    verify_block,
)
from specdec.core.rejection.torch_backend import greedy_requests
from specdec.lab.lossy_rules import verify_typical
from specdec.testing.rejection import reference
from specdec.testing.rejection.reference import Params

from .batches import Shape, equal, random_batch, select
from .problems import sampling_rows

NAN, INF = math.nan, math.inf
BAD_ROWS = {
    "one_nan": ([1.0, NAN, 5.0, 2.0], 2),
    "nan_at_the_maximum": ([1.0, 3.0, NAN, 2.0], 1),
    "all_nan": ([NAN] * 4, 0),
    "all_minus_inf": ([-INF] * 4, 0),
    "plus_inf": ([1.0, INF, 5.0, 2.0], 1),
    "two_plus_inf": ([1.0, INF, 5.0, INF], 1),
    "nan_and_inf": ([NAN, -INF, INF, 0.0], 2),
    "nan_else_minus_inf": ([NAN, -INF, -INF, -INF], 0),
}
MODES = {
    "greedy": [Params(temperature=0.0)] * 3,
    "sampled": [Params()] * 3,
    "filtered": [Params(top_k=2, top_p=0.9, min_p=0.1)] * 3,
    "mixed": [Params(), Params(temperature=0.0), Params(top_p=0.5)],
}
HEALTHY = [4.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [verify, reference.verify], ids=["backend", "reference"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_emits_its_argmax_and_rejects_its_draft(
    name: str, mode: str, function: object, dtype: torch.dtype
) -> None:
    row, best = BAD_ROWS[name]
    logits = torch.tensor([HEALTHY, HEALTHY, row, HEALTHY, HEALTHY, HEALTHY], dtype=dtype)
    drafts = DraftRows(torch.tensor([[0], [best], [0]]), torch.tensor([1, 1, 1]))
    uniforms = Uniforms(torch.full((3, 2), 0.3, dtype=torch.float64))
    verdict = function(logits, torch.tensor([0, 2, 4, 6]), drafts, sampling_rows(MODES[mode]), uniforms)
    assert verdict.output_ids.tolist() == [[0, 0], [best, -1], [0, 0]]
    assert verdict.num_accepted.tolist() == [1, 0, 1]
    assert verdict.status.tolist() == [0, STATUS_BAD_ROW, 0]


@pytest.mark.parametrize("mode", MODES)
def test_bad_row_after_the_stop_is_not_reported(mode: str) -> None:
    logits = torch.tensor([HEALTHY, [NAN] * 4, HEALTHY, [NAN] * 4, HEALTHY, HEALTHY])
    drafts = DraftRows(torch.tensor([[3], [0], [3]]), torch.tensor([1, 1, 1]))
    uniforms = Uniforms(torch.full((3, 2), 0.3, dtype=torch.float64))
    verdict = verify(logits, torch.tensor([0, 2, 4, 6]), drafts, sampling_rows(MODES[mode]), uniforms)
    assert verdict.status.tolist() == [0, STATUS_BAD_ROW, 0]
    assert verdict.output_ids.tolist() == [[0, -1], [0, 0], [0, -1]]


def test_bad_rows_change_nothing_for_their_neighbours() -> None:
    """Including the bits: the repair must not take another path for healthy rows."""
    for seed in range(20):
        batch = random_batch(seed, Shape(idle=0.0, vocab_size=140))
        poisoned = batch.logits.clone()
        poisoned[: int(batch.cu_rows[1])] = NAN
        rest = torch.arange(1, batch.num_requests)
        alone = select(batch, rest).verify()
        beside = replace(batch, logits=poisoned).verify()
        assert torch.equal(beside.output_ids[1:], alone.output_ids)
        assert torch.equal(beside.status[1:], alone.status)


@pytest.mark.parametrize("kind", [DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS, DistributionKind.SPARSE])
def test_nan_in_a_reported_distribution_emits_a_likely_token(kind: DistributionKind) -> None:
    distributions = DraftDistributions(
        kind=torch.tensor([kind], dtype=torch.uint8),
        draft_probs=torch.full((1, 1, 4), NAN),
        draft_logits=torch.full((1, 1, 4), NAN),
        sparse_ids=torch.arange(4).view(1, 1, 4),
        sparse_probs=torch.full((1, 1, 4), NAN),
    )
    drafts = DraftRows(torch.tensor([[3]]), torch.tensor([1]), distributions)
    logits = torch.tensor([[5.0, -INF, 4.0, -INF]] * 2)
    verdict = verify(logits, torch.tensor([0, 2]), drafts, sampling_rows([Params()]))
    assert int(verdict.num_accepted) == 0
    assert int(verdict.output_ids[0, 0]) in (0, 2)


@pytest.mark.parametrize("function", [verify, reference.verify], ids=["backend", "reference"])
def test_residual_emptied_by_a_wrong_distribution_falls_back_to_the_target(function: object) -> None:
    """q above p everywhere is no probability, yet it must not lead to a token of probability 0."""
    distributions = DraftDistributions(
        torch.tensor([DistributionKind.DENSE_PROBS], dtype=torch.uint8), draft_probs=torch.full((1, 1, 4), 2.0)
    )
    drafts = DraftRows(torch.tensor([[0]]), torch.tensor([1]), distributions)
    logits = torch.tensor([[0.0, -INF, 0.0, -INF]] * 2)
    uniforms = Uniforms(torch.full((1, 2), 0.75).double(), torch.full((1, 1), 0.9).double())
    verdict = function(logits, torch.tensor([0, 2]), drafts, sampling_rows([Params()]), uniforms)
    assert verdict.output_ids.tolist() == [[2, -1]]
    assert verdict.status.tolist() == [STATUS_EMPTY_RESIDUAL]


def test_nan_is_never_sampled() -> None:
    logits = torch.zeros(1, 300)
    logits[0, ::2] = NAN
    uniforms = [Uniforms(torch.tensor([[u]], dtype=torch.float64)) for u in torch.linspace(0.01, 0.99, 50).tolist()]
    tokens = {int(sample(logits, sampling_rows([Params()]), uniform).output_ids) for uniform in uniforms}
    assert tokens == {1}


@pytest.mark.parametrize("vocab_size", [4, 129, 4224])
def test_tail_tile_never_gives_an_id_beyond_the_vocabulary(vocab_size: int) -> None:
    """The last tile is all zeros, and padding must not win the tie."""
    logits = torch.full((1, vocab_size), -INF)
    logits[0, 0] = 0.0
    for params in (Params(), Params(temperature=0.0), Params(top_p=0.5)):
        for uniform in (2.0**-53, 0.5, 1 - 2.0**-53, 1.0):
            verdict = sample(logits, sampling_rows([params]), Uniforms(torch.tensor([[uniform]], dtype=torch.float64)))
            assert verdict.output_ids.tolist() == [[0]]


def test_bad_rows_are_the_same_bits_with_and_without_all_greedy() -> None:
    for seed in range(10):
        batch = random_batch(seed, Shape(greedy=1.0, filters=False))
        batch.logits[::3, 1] = NAN
        slow = replace(batch, sampling=replace(batch.sampling, all_greedy=False)).verify()
        assert equal(slow, batch.verify())


@pytest.mark.parametrize("rule", [verify_block, verify_typical])
def test_the_other_rules_accept_nothing_at_a_bad_row(rule: Callable[..., Verdict]) -> None:
    """Every draft is as likely as what it was drawn from: but for that row all would be accepted."""
    logits = torch.zeros(4, 4)
    logits[1] = torch.tensor([1.0, NAN, 5.0, 2.0])
    kind = torch.tensor([DistributionKind.DENSE_PROBS], dtype=torch.uint8)
    drawn_from = DraftDistributions(kind, draft_probs=torch.full((1, 3, 4), 0.25))
    drafts = DraftRows(torch.tensor([[3, 3, 3]]), torch.tensor([3]), drawn_from)
    verdict = rule(logits, torch.tensor([0, 4]), drafts, sampling_rows([Params()]))
    assert verdict.num_accepted.tolist() == [1]
    assert verdict.output_ids.tolist() == [[3, 2, -1, -1]]
    assert verdict.status.tolist() == [STATUS_BAD_ROW]


def test_a_greedy_request_that_stops_at_a_bad_row_says_so_though_another_was_healthy() -> None:
    drafts = DraftRows(torch.tensor([[0]]), torch.tensor([1]))
    logits = torch.tensor([HEALTHY, [NAN] * 4])
    verdict = verify(logits, torch.tensor([0, 2]), drafts, sampling_rows(MODES["greedy"][:1]))
    assert (verdict.num_accepted.tolist(), verdict.status.tolist()) == ([1], [STATUS_BAD_ROW])


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_batch_without_rows_emits_nothing(mode: str) -> None:
    drafts = DraftRows(torch.full((3, 1), -1), torch.zeros(3, dtype=torch.int64))
    verdict = verify(torch.empty(0, 4), torch.zeros(4, dtype=torch.int64), drafts, sampling_rows(MODES[mode]))
    assert verdict.output_ids.tolist() == [[-1, -1]] * 3
    assert verdict.num_accepted.tolist() == verdict.status.tolist() == [0] * 3


def test_where_no_request_is_greedy_the_host_says_so() -> None:
    assert greedy_requests(sampling_rows(MODES["sampled"])) is None
    found = greedy_requests(sampling_rows(MODES["mixed"]))
    assert found is not None
    assert found.tolist() == [False, True, False]


def test_rows_that_share_memory_are_refused_and_rows_of_one_token_are_not() -> None:
    drafts = DraftRows(torch.empty(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    sampling = sampling_rows(MODES["sampled"])
    with pytest.raises(ValueError, match="share no memory"):
        verify(torch.zeros(1, 4).expand(3, 4), torch.arange(4), drafts, sampling)
    for rows in (torch.zeros(3, 1), torch.zeros(1, 3).t()):
        assert verify(rows, torch.arange(4), drafts, sampling).output_ids.tolist() == [[0]] * 3
