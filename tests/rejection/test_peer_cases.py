"""Bugs that other engines have had, as cases; each names where it was reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.core.rejection import (
    IMPOSSIBLE,
    NO_PROPOSAL,
    DistributionKind,
    DraftDistributions,
    DraftRows,
    Uniforms,
    Verdict,
    sample,
    verify,
)
from specdec.testing.rejection import reference
from specdec.testing.rejection.reference import Params

from .problems import sampling_rows

BOTH = pytest.mark.parametrize("function", [verify, reference.verify], ids=["backend", "reference"])
DOUBLE = torch.float64
LAST_UNIFORM, FIRST_UNIFORM = 1 - 2.0**-53, 2.0**-53
HALVES = torch.tensor([0.5, 0.5]).log()


def one_request(
    function: object,
    logits: Tensor,
    token_ids: list[int],
    distributions: DraftDistributions | None,
    accept: float = 0.5,
    output: float = 0.5,
    params: Params = Params(),  # noqa: B008
) -> Verdict:
    """One request of n drafts with the same uniform at every place. logits [n + 1, V]."""
    n = len(token_ids)
    drafts = DraftRows(torch.tensor([token_ids], dtype=torch.int64), torch.tensor([n]), distributions)
    uniforms = Uniforms(torch.full((1, n + 1), output, dtype=DOUBLE), torch.full((1, n), accept, dtype=DOUBLE))
    return function(logits, torch.tensor([0, n + 1]), drafts, sampling_rows([params]), uniforms)


def dense(probs: Tensor) -> DraftDistributions:
    return DraftDistributions(torch.tensor([DistributionKind.DENSE_PROBS], dtype=torch.uint8), draft_probs=probs[None])


def share_of_first(function: object, sentinel: int) -> float:
    """P(token 0) after a sentinel, from the token that each of a grid of output uniforms draws."""
    logits = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    distributions = dense(torch.tensor([[0.9, 0.1]]))
    uniforms = ((torch.arange(64) + 0.5) / 64).tolist()
    drawn = [one_request(function, logits, [sentinel], distributions, output=u).output_ids[0, 0] for u in uniforms]
    return sum(int(token) == 0 for token in drawn) / len(drawn)


@BOTH
def test_impossible_and_no_proposal_follow_different_distributions(function: object) -> None:
    """vLLM V2 draws both from p, vLLM V1 both from the residual (0.33, read in its kernels)."""
    assert share_of_first(function, NO_PROPOSAL) == 0.5
    assert share_of_first(function, IMPOSSIBLE) == 0.0


@BOTH
@pytest.mark.parametrize("sentinel", [NO_PROPOSAL, IMPOSSIBLE, -7, 2, 10**6])
@pytest.mark.parametrize("reported", [True, False])
def test_ids_outside_the_vocabulary_are_never_accepted(function: object, sentinel: int, reported: bool) -> None:
    """vllm#46533: -1 read out of bounds, and could be accepted."""
    distributions = dense(torch.tensor([[0.5, 0.5], [0.5, 0.5]])) if reported else None
    for uniform in (FIRST_UNIFORM, 0.5, LAST_UNIFORM):
        verdict = one_request(function, HALVES.expand(3, 2).clone(), [sentinel, 0], distributions, uniform, uniform)
        assert int(verdict.num_accepted) == 0
        assert int(verdict.output_ids[0, 0]) in (0, 1)
        assert verdict.output_ids[0, 1:].tolist() == [-1, -1]


@pytest.mark.parametrize("vocab_size", [5, 129, 300])
def test_equal_distributions_accept_every_draft_whatever_the_uniform(vocab_size: int) -> None:
    """vLLM V2: p == q bitwise and a uniform near 1 rejected, then emitted token 0 of probability 0."""
    g = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(41, vocab_size, generator=g)
    logits[:, 0] = -torch.inf
    ids = logits[:40].argmax(1)
    distributions = DraftDistributions(
        torch.full((40,), DistributionKind.DENSE_LOGITS, dtype=torch.uint8), draft_logits=logits[:40, None]
    )
    rows = torch.stack((logits[:40], logits[1:]), 1).flatten(0, 1)
    drafts = DraftRows(ids[:, None], torch.ones(40, dtype=torch.int64), distributions)
    uniforms = Uniforms(
        torch.full((40, 2), LAST_UNIFORM, dtype=DOUBLE), torch.full((40, 1), LAST_UNIFORM, dtype=DOUBLE)
    )
    for function in (verify, reference.verify):
        verdict = function(rows, torch.arange(41) * 2, drafts, sampling_rows([Params()] * 40), uniforms)
        assert verdict.num_accepted.tolist() == [1] * 40
        assert (verdict.output_ids > 0).all()
        assert not verdict.status.any()


@BOTH
@pytest.mark.parametrize("uniform", [0.0, FIRST_UNIFORM])
def test_lowest_uniform_does_not_accept_what_the_target_forbids(function: object, uniform: float) -> None:
    """sglang#35771: an inclusive comparison accepts p = 0 at a uniform of 0."""
    logits = torch.tensor([[-torch.inf, 0.0], [0.0, 0.0]])
    for distributions in (dense(torch.tensor([[1.0, 0.0]])), dense(torch.tensor([[0.0, 1.0]])), None):
        verdict = one_request(function, logits, [0], distributions, uniform, uniform)
        assert int(verdict.num_accepted) == 0
        assert verdict.output_ids.tolist() == [[1, -1]]


@BOTH
@pytest.mark.parametrize("uniform", [0.0, FIRST_UNIFORM, 0.25, 0.5, 0.75, LAST_UNIFORM, 1.0])
def test_uniform_on_a_boundary_of_the_cdf_gives_a_possible_token(function: object, uniform: float) -> None:
    """pytorch#192577 and kin: a zero of the noise makes a zero-probability token win."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, 0.0, -torch.inf, 0.0, -torch.inf]])
    verdict = one_request(function, logits, [], None, output=uniform)
    assert int(verdict.output_ids[0, 0]) in (1, 3, 4, 6)


@BOTH
def test_draft_that_its_distribution_cannot_have_drawn_is_not_accepted(function: object) -> None:
    verdict = one_request(function, HALVES.expand(2, 2).clone(), [0], dense(torch.tensor([[0.0, 1.0]])), FIRST_UNIFORM)
    assert int(verdict.num_accepted) == 0


@BOTH
def test_tokens_beyond_the_draft_vocabulary_keep_their_mass(function: object) -> None:
    """vLLM V2 works on the smaller of both vocabularies, and drops p outside the draft's."""
    logits = torch.tensor([[0.25, 0.25, 0.25, 0.25]] * 2).log()
    narrow = dense(torch.tensor([[1.0, 0.0]]))
    uniforms = ((torch.arange(30) + 0.5) / 30).tolist()
    drawn = [int(one_request(function, logits, [0], narrow, 0.9, u).output_ids[0, 0]) for u in uniforms]
    assert [drawn.count(token) for token in range(4)] == [0, 10, 10, 10]


@BOTH
def test_draft_vocabulary_wider_than_the_target_is_lossless(function: object) -> None:
    """Padded draft heads can draw ids that the target does not have; their distribution counts, their ids do not."""
    logits = HALVES.expand(2, 2).clone()
    wide = dense(torch.tensor([[0.5, 0.1, 0.4]]))
    assert int(one_request(function, logits, [2], wide, FIRST_UNIFORM).num_accepted) == 0
    drawn = [int(one_request(function, logits, [2], wide, output=u).output_ids[0, 0]) for u in (0.01, 0.5, 0.99)]
    assert drawn == [1, 1, 1]


@BOTH
def test_temperature_zero_takes_the_lowest_of_equal_maxima(function: object) -> None:
    """Greedy encoded as top_k = 1, or as a huge inverse temperature, samples among ties (sglang, rbln#915)."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]] * 2)
    soft = dense(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    for distributions in (soft, None):
        for uniform in (FIRST_UNIFORM, 0.5, LAST_UNIFORM):
            greedy = Params(temperature=0.0, top_k=3, top_p=0.5, min_p=0.9)
            right = one_request(function, logits, [1], distributions, uniform, uniform, greedy)
            wrong = one_request(function, logits, [2], distributions, uniform, uniform, greedy)
            assert right.output_ids.tolist() == [[1, 1]]
            assert wrong.output_ids.tolist() == [[1, -1]]


def test_sampling_parameters_hold_on_every_row_and_not_only_on_the_bonus_row() -> None:
    """vllm#42744, sglang#10617: min_p and others were applied to the last row alone."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 9, generator=g)
    params = Params(temperature=0.9, top_k=4, top_p=0.8, min_p=0.05)
    for u in torch.linspace(0.02, 0.98, 25).tolist():
        plain = [int(sample(row[None], sampling_rows([params]), uniform_of(u)).output_ids) for row in logits]
        verdict = one_request(verify, logits, plain[:3], None, output=u, params=params)
        assert verdict.output_ids.tolist() == [plain]


def uniform_of(u: float) -> Uniforms:
    return Uniforms(torch.tensor([[u]], dtype=torch.float64))


def test_one_hot_residual_leaves_the_target_distribution_alone() -> None:
    """vllm-ascend#2881: the draft's probability was zeroed in place."""
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2)
    before = logits.clone()
    distribution = dense(torch.tensor([[0.0, 0.0, 1.0]]))
    kept = distribution.draft_probs.clone()
    one_request(verify, logits, [2], distribution, accept=LAST_UNIFORM)
    assert torch.equal(logits, before)
    assert torch.equal(distribution.draft_probs, kept)


def test_streams_of_a_seed_do_not_depend_on_the_place_in_the_batch() -> None:
    """1Cat-vLLM#656, FlashInfer's subsequence per row: results changed with the slot."""
    logits = torch.zeros(6, 50)
    same = replace(sampling_rows([Params()] * 6), seed=torch.full((6,), 5), position=torch.full((6,), 9))
    assert len(set(sample(logits, same).output_ids.flatten().tolist())) == 1
    other = replace(same, seed=torch.arange(6) - 3)
    assert len(set(sample(logits, other).output_ids.flatten().tolist())) > 3


@pytest.mark.parametrize("position", [0, 2**32, 2**40 + 3])
@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_negative_seeds_and_far_positions_draw(seed: int, position: int) -> None:
    base = sampling_rows([Params()] * 40)
    sampling = replace(base, seed=torch.full((40,), seed), position=position + torch.arange(40))
    tokens = sample(torch.zeros(40, 50), sampling).output_ids.flatten()
    assert len(set(tokens.tolist())) > 15


def test_long_draft_of_one_request() -> None:
    logits = torch.randn(129, 20, generator=torch.Generator().manual_seed(1))
    ids = logits[:128].argmax(1).tolist()
    verdict = one_request(verify, logits, ids, None, params=Params(temperature=0.0))
    assert int(verdict.num_accepted) == 128
    assert verdict.output_ids.tolist() == [logits.argmax(1).tolist()]


def test_empty_batch_and_batch_without_rows() -> None:
    for num_requests in (0, 3):
        drafts = DraftRows(torch.full((num_requests, 2), -1), torch.zeros(num_requests, dtype=torch.int64))
        cu_rows = torch.zeros(num_requests + 1, dtype=torch.int64)
        verdict = verify(torch.empty(0, 5), cu_rows, drafts, sampling_rows([Params()] * num_requests))
        assert verdict.output_ids.tolist() == [[-1, -1, -1]] * num_requests
        assert verdict.num_accepted.tolist() == [0] * num_requests


def test_shapes_that_contradict_each_other_are_refused() -> None:
    """vllm PR#35398: per-token tensors passed where per-request ones belong gave wrong seeds."""
    logits, drafts = torch.zeros(2, 5), DraftRows(torch.tensor([[1]]), torch.tensor([1]))
    cu_rows, sampling = torch.tensor([0, 2]), sampling_rows([Params()])
    with pytest.raises(ValueError, match=r"position \[1\] for 1 requests"):
        verify(logits, cu_rows, drafts, replace(sampling, position=torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"cu_rows \[2\]"):
        verify(logits, torch.tensor([0, 1, 2]), drafts, sampling)
    with pytest.raises(ValueError, match="strides"):
        verify(torch.zeros(5, 2).T, cu_rows, drafts, sampling)
    with pytest.raises(ValueError, match="strides"):
        verify(torch.zeros(5).expand(2, 5), cu_rows, drafts, sampling)
    with pytest.raises(ValueError, match="output uniforms"):
        verify(logits, cu_rows, drafts, sampling, Uniforms(torch.zeros(1, 3)))
    reported = replace(drafts, distributions=dense(torch.full((1, 5), 0.2)))
    with pytest.raises(ValueError, match="accept uniforms"):
        verify(logits, cu_rows, reported, sampling, Uniforms(torch.zeros(1, 2)))
    with pytest.raises(ValueError, match="device type 'meta'"):
        verify(logits.to("meta"), cu_rows, drafts, sampling)
