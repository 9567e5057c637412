"""DraftSampler: the reported distribution is the filtered softmax and what is drawn comes from it; rows, budgets are
kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from specdec.sdk import PADDING_TOKEN_ID, ConfigError, DistributionKind, SamplingView
from specdec.sdk.model_proposer import DraftSampler, DraftVocabulary
from specdec.sdk.model_proposer.draft_masks import DraftMasks
from specdec.sdk.model_proposer.vocabulary import ARGMAX
from specdec.testing import FakeServices, step_view

V, K = 24, 4
PARAMETERS = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 2.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.8, "min_p": 0.15},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1e-3},
    {"temperature": 1e-45},
]
B = len(PARAMETERS)


def sampling_view(parameters):
    def column(name, default, dtype):
        return torch.tensor([each.get(name, default) for each in parameters], dtype=dtype)

    return SamplingView(
        temperature=column("temperature", 0.0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        all_greedy=all(each.get("temperature", 0) == 0 for each in parameters),
    )


@dataclass(frozen=True)
class Uniforms:
    """Numbers of a seeded generator, the same ones whenever they are asked for."""

    seed: int
    num_rows: int

    def uniform(self, draft_index):
        generator = torch.Generator().manual_seed(1000 * self.seed + draft_index)
        return torch.rand(self.num_rows, dtype=torch.float64, generator=generator).clamp_min(2**-53)


def step_of(parameters, budget=None, seed=0):
    count = len(parameters)
    step = step_view([[1, 2]] * count, K, budget=budget)
    return replace(step, sampling=sampling_view(parameters), random=Uniforms(seed, count))


def logits_of(*shape, seed=0, dtype=torch.float32):
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def filtered_softmax(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """By definition, in float64: temperature, top-k, then min-p and top-p over what top-k left. [V]"""
    probs = (logits.double() / torch.tensor(temperature, dtype=torch.float32).double()).softmax(-1)
    order = probs.argsort(descending=True, stable=True)
    kept, mass = torch.zeros(len(probs), dtype=torch.bool), 0.0
    limit = top_k or len(probs)
    total = float(probs[order[:limit]].sum())
    for token in order[:limit].tolist():
        if mass / total >= top_p or float(probs[token]) < min_p * float(probs.max()) * (1 - 1e-6):
            break
        kept[token] = True
        mass += float(probs[token])
    kept[order[0]] = True
    return torch.where(kept, probs, 0.0) / probs[kept].sum()


def dense_of(distribution, row, index, size=V):
    """A reported distribution over the target's vocabulary: float64 [size]."""
    if DistributionKind(int(distribution.kind[row])) is DistributionKind.DENSE_LOGITS:
        return distribution.logits[row, index].double().softmax(-1)
    ids, probs = distribution.sparse_ids[row, index], distribution.sparse_probs[row, index].double()
    assert float(probs[ids < 0].abs().sum()) == 0
    return torch.zeros(size, dtype=torch.float64).index_add(0, ids.clamp(min=0), probs)


def sampler_for(step, form, chosen=None, vocabulary=None, top_m=V):
    return DraftSampler(step, chosen, form, sparse_top_m=top_m, vocabulary=vocabulary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_the_distribution_is_the_filtered_softmax(form, dtype):
    step, logits = step_of(PARAMETERS), logits_of(K, B, V, dtype=dtype)
    sampler = sampler_for(step, form)
    for each in logits:
        sampler.draw(each)
    distribution = sampler.draft().distribution
    for row, parameters in enumerate(PARAMETERS):
        for index in range(K):
            expected = filtered_softmax(logits[index, row], **parameters)
            assert torch.allclose(dense_of(distribution, row, index), expected, atol=1e-6), (row, index)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_what_is_drawn_inverts_the_distributions_distribution(form):
    """Ids in order of falling probability, the first one whose cumulated probability exceeds the uniform number."""
    for seed in range(20):
        step, logits = step_of(PARAMETERS, seed=seed), logits_of(B, V, seed=seed)
        drawn = sampler_for(step, form).draw(logits)
        uniform = step.random.uniform(0)
        for row, parameters in enumerate(PARAMETERS):
            expected = filtered_softmax(logits[row], **parameters)
            probs, order = expected.sort(descending=True, stable=True)
            rank = order.tolist().index(int(drawn[row]))
            above = float(probs.cumsum(0)[rank])
            assert above - float(probs[rank]) - 1e-6 <= float(uniform[row]) <= above + 1e-6


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_draws_are_as_frequent_as_the_distribution_says(form):
    logits, parameters = logits_of(1, V), {"temperature": 1.0, "top_k": 6}
    count = 4000
    tokens = sampler_for(step_of([parameters] * count), form).draw(logits.expand(count, V))
    found = torch.bincount(tokens, minlength=V).double() / count
    expected = filtered_softmax(logits[0], **parameters)
    assert float((found - expected).abs().max()) < 4 * 0.5 / count**0.5


def test_bfloat16_logits_are_read_as_they_are():
    """Equal in bfloat16 means equally likely, whatever they were before rounding."""
    logits = torch.tensor([[2.0, 2.001, -1.0]]).bfloat16()
    sampler = sampler_for(step_of([{"temperature": 1.0}]), "dense")
    sampler.draw(logits)
    distribution = dense_of(sampler.draft().distribution, 0, 0)
    assert float(distribution[0]) == pytest.approx(float(distribution[1]))


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_greedy_rows_are_one_hot_and_take_the_likeliest_token(form):
    parameters = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.0, "top_k": 3}]
    logits = logits_of(3, V)
    sampler = sampler_for(step_of(parameters), form)
    drawn = sampler.draw(logits)
    assert drawn[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    tag = DistributionKind.DENSE_LOGITS if form == "dense" else DistributionKind.SPARSE
    assert sampler.draft().distribution.kind.tolist() == [DistributionKind.ONE_HOT, tag, DistributionKind.ONE_HOT]


@pytest.mark.parametrize("form", ["one_hot", "dense", "sparse"])
def test_a_batch_that_needs_no_distribution_reports_none(form):
    parameters = [{"temperature": 1.0 if form == "one_hot" else 0.0}] * 2
    logits = logits_of(2, V)
    sampler = sampler_for(step_of(parameters), form)
    assert sampler.draw(logits).tolist() == logits.argmax(-1).tolist()
    assert sampler.draft().distribution is None


def test_a_sparse_distribution_is_the_likeliest_tokens_renormalised():
    logits = logits_of(1, V)
    sampler = sampler_for(step_of([{"temperature": 1.0}]), "sparse", top_m=5)
    drawn = sampler.draw(logits)
    distribution = dense_of(sampler.draft().distribution, 0, 0)
    whole = logits[0].double().softmax(-1)
    best = whole.topk(5).indices
    assert set(distribution.nonzero()[:, 0].tolist()) == set(best.tolist())
    assert torch.allclose(distribution[best], whole[best] / whole[best].sum(), atol=1e-6)
    assert int(drawn) in best.tolist()


def test_top_p_counts_mass_over_the_whole_vocabulary_not_over_the_kept_tokens():
    """Uniform over 20 tokens, the 5 likeliest kept: half of the mass is more than they all have."""
    logits = torch.zeros(1, 20)
    sampler = sampler_for(step_of([{"temperature": 1.0, "top_p": 0.5}]), "sparse", top_m=5)
    sampler.draw(logits)
    assert sampler.draft().distribution.sparse_probs[0, 0].tolist() == pytest.approx([0.2] * 5)


TARGET_IDS = torch.tensor([40, 3, 17, 29, 8, 50])


@pytest.mark.parametrize("form", ["one_hot", "dense", "sparse"])
def test_a_mapped_vocabulary_drafts_target_ids(form):
    vocabulary, logits = DraftVocabulary(TARGET_IDS), logits_of(3, len(TARGET_IDS))
    step = step_of([{"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}, {"temperature": 0.0}])
    sampler = sampler_for(step, form, vocabulary=vocabulary, top_m=4)
    drawn = sampler.draw(logits)
    draft = sampler.draft()
    assert set(drawn.tolist()) <= set(TARGET_IDS.tolist())
    assert draft.token_ids[:, 0].tolist() == drawn.tolist()
    assert int(drawn[2]) == int(TARGET_IDS[logits[2].argmax()])
    if form == "dense":  # over the draft's own ids: the engine maps them
        assert draft.distribution.logits.shape == (3, K, len(TARGET_IDS))
    if form == "sparse":
        top = logits[1].topk(2).indices
        distribution = dense_of(draft.distribution, 1, 0, size=64)
        assert set(distribution.nonzero()[:, 0].tolist()) == set(TARGET_IDS[top].tolist())


def test_a_vocabulary_smaller_than_the_sparse_distribution_is_padded():
    sampler = sampler_for(step_of([{"temperature": 1.0}]), "sparse", vocabulary=DraftVocabulary(TARGET_IDS), top_m=10)
    sampler.draw(logits_of(1, len(TARGET_IDS)))
    distribution = sampler.draft().distribution
    assert distribution.sparse_ids.shape == distribution.sparse_probs.shape == (1, K, 10)
    assert distribution.sparse_ids[0, 0, 6:].tolist() == [PADDING_TOKEN_ID] * 4
    assert distribution.sparse_probs[0, 0].sum().item() == pytest.approx(1)
    assert distribution.sparse_probs[0, 0, 6:].tolist() == [0] * 4


@pytest.mark.parametrize("form", ["one_hot", "dense", "sparse"])
def test_rows_are_cut_to_their_budgets(form):
    budget = [4, 0, 2, 1]
    step, logits = step_of([{"temperature": 1.0}] * 4, budget=budget), logits_of(K, 4, V)
    sampler = sampler_for(step, form)
    drawn = [sampler.draw(each).tolist() for each in logits]
    draft = sampler.draft()
    assert draft.lengths.tolist() == budget
    for row, length in enumerate(budget):
        expected = [drawn[index][row] for index in range(length)] + [PADDING_TOKEN_ID] * (K - length)
        assert draft.token_ids[row].tolist() == expected


@pytest.mark.parametrize("form", ["one_hot", "dense", "sparse"])
def test_lengths_stop_at_what_was_drawn(form):
    step, logits = step_of([{"temperature": 1.0}] * 2, budget=[4, 1]), logits_of(2, 2, V)
    sampler = sampler_for(step, form)
    for each in logits:
        sampler.draw(each)
    draft = sampler.draft()
    assert draft.lengths.tolist() == [2, 1]
    assert draft.token_ids.shape == (2, K)


@pytest.mark.parametrize("form", ["one_hot", "dense", "sparse"])
def test_chosen_rows_are_drafted_as_if_all_were(form):
    """The rows that were left out get nothing; the others get the same tokens and distributions."""
    parameters = PARAMETERS[:5]
    budget = [3, 0, 2, 0, 4]
    step, logits = step_of(parameters, budget=budget), logits_of(K, 5, V)
    whole, part = sampler_for(step, form), sampler_for(step, form, chosen=(chosen := torch.tensor([0, 2, 4])))
    for each in logits:
        assert part.draw(each[chosen]).tolist() == whole.draw(each)[chosen].tolist()
    expected, found = whole.draft(), part.draft()
    assert found.lengths.tolist() == budget
    assert torch.equal(found.token_ids, expected.token_ids)
    if form != "one_hot":
        assert found.distribution.kind.tolist()[1::2] == [DistributionKind.ONE_HOT] * 2
        for row in chosen.tolist():
            for index in range(budget[row]):
                assert torch.equal(
                    dense_of(found.distribution, row, index), dense_of(expected.distribution, row, index)
                )


def test_the_same_stream_gives_the_same_draft_and_another_seed_another():
    logits = logits_of(B, V)
    drawn = [
        sampler_for(step_of([{"temperature": 3.0}] * B, seed=seed), "dense").draw(logits).tolist() for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_offsets_are_added_to_draft_ids():
    vocabulary = DraftVocabulary.from_offsets(torch.tensor([2, 2, 5]), 64)
    assert vocabulary.target_ids.tolist() == [2, 3, 7]
    assert vocabulary.target_ids.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_token_in_order_is_no_map_at_all(dtype):
    assert DraftVocabulary.from_offsets(torch.zeros(8, dtype=dtype), 8) is None
    assert DraftVocabulary.from_ids(torch.arange(8, dtype=dtype), 8) is None
    assert DraftVocabulary.from_ids(torch.arange(7, dtype=dtype), 8) is not None
    assert DraftVocabulary.from_ids(torch.arange(8, dtype=dtype).flip(0), 8) is not None


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([0, 9], "2 different ids in 0 .. 9"),
        ([-1, 3], "2 different ids in -1 .. 3"),
        ([4, 4], "1 different ids in 4"),
    ],
    ids=["beyond", "negative", "twice"],
)
def test_a_map_that_does_not_fit_is_refused_with_the_numbers(ids, found):
    with pytest.raises(ConfigError) as caught:
        DraftVocabulary.from_ids(torch.tensor(ids), 8)
    assert caught.value.code == "SD-E173"
    assert found in str(caught.value)
    assert "0 .. 7" in str(caught.value)


class OneAllowed(FakeServices):
    """Grammars that allow one token of each request."""

    def allowed(self, request_id, suffix=()):
        return torch.arange(V) == {"request-0": 3, "request-1": 5}[request_id]


@pytest.mark.parametrize("form", ["one_hot", "dense", "sparse"])
def test_a_row_that_can_draw_nothing_that_its_grammar_allows_is_drawn_as_if_it_had_none(form):
    step, logits = step_of([{"temperature": 1.0}] * 2), logits_of(2, V)
    logits[0, 3] = -torch.inf  # as for a token that the draft model's own tokenizer lacks
    masked = DraftSampler(step, None, form, sparse_top_m=V, masks=DraftMasks(OneAllowed(), step.request_ids))
    free, _ = sampler_for(step, form).draw(logits).tolist()
    assert masked.draw(logits).tolist() == [free, 5]
    if form != "one_hot":
        distribution = masked.draft().distribution
        assert torch.allclose(dense_of(distribution, 0, 0), filtered_softmax(logits[0], temperature=1.0), atol=1e-6)
        assert dense_of(distribution, 1, 0)[5] == 1


def test_nothing_drawn_is_a_draft_of_nothing():
    step = step_view([[1, 2, 3], [4, 5]], 3, budget=[0, 0])
    draft = DraftSampler(step, torch.tensor([], dtype=torch.int64), "one_hot").draft()
    assert draft.lengths.tolist() == [0, 0]
    assert draft.token_ids.tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 2, 700), (0, 7)], ids=str)
def test_the_cpus_argmax_is_the_first_maximum_and_a_nan_before_all(shape, dtype):
    values = torch.randint(4, shape).to(dtype)  # many ties
    first = (values == values.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(ARGMAX["cpu"](values), first)
    values[..., 3] = torch.nan
    assert (ARGMAX["cpu"](values) == 3).all()
