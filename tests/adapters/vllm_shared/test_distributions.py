"""Draft distributions as vLLM's verifier takes them are those of our own verification."""

from __future__ import annotations

import torch

from specdec.adapters.vllm_shared.distributions import dense_rows, dense_slots
from specdec.core.rejection.types import DistributionKind, DraftDistributions
from specdec.testing.rejection.reference import draft_distribution

V, K = 11, 3


def mixed_distributions(t2d=None):
    generator = torch.Generator().manual_seed(3)
    width = V if t2d is None else int((t2d >= 0).sum())
    return DraftDistributions(
        kind=torch.tensor(
            [
                DistributionKind.DENSE_PROBS,
                DistributionKind.ONE_HOT,
                DistributionKind.DENSE_LOGITS,
                DistributionKind.SPARSE,
            ],
            dtype=torch.uint8,
        ),
        draft_probs=torch.rand(4, K, width, generator=generator).softmax(dim=-1),
        draft_logits=torch.randn(4, K, width, generator=generator),
        sparse_ids=_only_last(torch.tensor([4, 9, -1]), 99),
        sparse_probs=_only_last(torch.tensor([0.25, 0.75, 0.0]), torch.nan),
        t2d=t2d,
    )


def _only_last(values, other):
    """Buffers hold anything where a row is of another kind."""
    return torch.cat([torch.full((3, K, 3), other), values.expand(1, K, 3)])


def check(distributions):
    drafts = [[4, 5], [7], [1, 2, 3], [9]]
    rows = dense_rows(distributions, drafts, V)
    assert rows.shape == (7, V)
    assert rows.dtype == torch.float32
    assert rows.is_contiguous()
    places = [(request, position, token) for request, ids in enumerate(drafts) for position, token in enumerate(ids)]
    for row, (request, position, token) in zip(rows, places, strict=True):
        distribution = draft_distribution(distributions, request, position, V)
        expected = (
            torch.nn.functional.one_hot(torch.tensor(token), V).double() if distribution is None else distribution
        )
        torch.testing.assert_close(row.double(), expected, atol=1e-6, rtol=0)


def test_every_form_of_distribution_becomes_its_probabilities_over_target_ids():
    check(mixed_distributions())


def test_distributions_over_a_smaller_draft_vocabulary_are_mapped_to_target_ids():
    t2d = torch.full((V,), -1)
    t2d[torch.tensor([4, 5, 7, 1, 2, 3])] = torch.arange(6)
    check(mixed_distributions(t2d))


def test_slots_that_are_no_drafts_are_certain_of_their_token():
    slots = torch.tensor([[4, 5, 8], [7, 8, 8], [1, 2, 3], [9, 8, 8]])
    is_draft = torch.arange(K) < torch.tensor([2, 1, 3, 1])[:, None]
    q = dense_slots(mixed_distributions(), slots, is_draft, V)
    rows = dense_rows(mixed_distributions(), [[4, 5], [7], [1, 2, 3], [9]], V)
    torch.testing.assert_close(q[is_draft], rows)
    assert (q[~is_draft] == torch.nn.functional.one_hot(torch.tensor(8), V)).all()
    assert (dense_slots(None, slots, is_draft, V).argmax(dim=-1) == slots).all()


def test_what_fills_a_step_up_was_not_drawn():
    drafts = [[4, 5], [-1, -1], [1], [9]]
    rows = dense_rows(mixed_distributions(), drafts, V)
    assert (rows[2:4] == 0).all(), "so that the verifier samples there from the target alone"
    torch.testing.assert_close(rows[[0, 1, 4, 5]], dense_rows(mixed_distributions(), [[4, 5], [], [1], [9]], V))
