"""What must hold of every verdict, whatever the batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.core.rejection import DistributionKind, DraftRows, Uniforms, sample
from specdec.core.rejection.uniforms import draw_uniforms
from specdec.testing.rejection.reference import Params, target_distribution

from .batches import ALL_KINDS, Batch, Shape, equal, random_batch, select, tensors_of

SHAPES = st.builds(
    Shape,
    num_requests=st.integers(1, 7),
    num_drafts=st.integers(0, 5),
    vocab_size=st.sampled_from([1, 2, 3, 7, 64, 129, 300]),
    kinds=st.sampled_from(
        [ALL_KINDS, (DistributionKind.ONE_HOT,), (DistributionKind.DENSE_PROBS, DistributionKind.SPARSE)]
    ),
    filters=st.booleans(),
    greedy=st.sampled_from([0.0, 0.3, 1.0]),
    idle=st.sampled_from([0.0, 0.3]),
    mapped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
BATCHES = st.builds(random_batch, st.integers(0, 2**31), SHAPES)
many = settings(max_examples=120, deadline=None, derandomize=True)
some = settings(max_examples=40, deadline=None, derandomize=True)


def params_of(batch: Batch, request: int) -> Params:
    s = batch.sampling
    temperature, top_p, min_p = (float(values[request]) for values in (s.temperature, s.top_p, s.min_p))
    return Params(temperature, int(s.top_k[request]), top_p, min_p)


@many
@given(BATCHES)
def test_output_is_accepted_drafts_then_one_token_then_padding(batch: Batch) -> None:
    verdict = batch.verify()
    for b, ids in enumerate(verdict.output_ids.tolist()):
        accepted, has_rows = int(verdict.num_accepted[b]), len(batch.rows(b)) > 0
        assert 0 <= accepted <= int(batch.drafts.lengths[b])
        assert ids[:accepted] == batch.drafts.token_ids[b, :accepted].tolist()
        assert ids[accepted + has_rows :] == [-1] * (len(ids) - accepted - has_rows)
        assert all(0 <= token < batch.logits.shape[1] for token in ids[: accepted + has_rows])


@many
@given(BATCHES)
def test_every_emitted_token_has_positive_probability(batch: Batch) -> None:
    verdict = batch.verify()
    for b, ids in enumerate(verdict.output_ids.tolist()):
        for row, token in zip(batch.rows(b), [i for i in ids if i >= 0], strict=False):
            assert float(target_distribution(row, params_of(batch, b))[token]) > 0


@some
@given(BATCHES, st.randoms(use_true_random=False))
def test_order_and_company_of_requests_change_no_bit(batch: Batch, random: object) -> None:
    whole = batch.verify()
    order = torch.tensor(random.sample(range(batch.num_requests), random.randint(1, batch.num_requests)))
    part = select(batch, order)
    if not len(part.logits):
        return
    verdict = part.verify()
    assert torch.equal(verdict.output_ids, whole.output_ids[order])
    assert torch.equal(verdict.num_accepted, whole.num_accepted[order])
    assert torch.equal(verdict.status, whole.status[order])


@some
@given(BATCHES)
def test_padding_and_poison_beyond_the_drafts_change_no_bit(batch: Batch) -> None:
    plain = batch.verify()
    drafts, width = batch.drafts, batch.drafts.token_ids.shape[1]
    beyond = torch.arange(width + 2) >= drafts.lengths.unsqueeze(1)
    ids = torch.nn.functional.pad(drafts.token_ids, (0, 2), value=-1).masked_fill(beyond, 0)
    distributions = drafts.distributions
    if distributions is not None:
        distributions = replace(
            distributions,
            draft_probs=poisoned(
                distributions.draft_probs, beyond | (distributions.kind != DistributionKind.DENSE_PROBS).unsqueeze(1)
            ),
            draft_logits=poisoned(
                distributions.draft_logits, beyond | (distributions.kind != DistributionKind.DENSE_LOGITS).unsqueeze(1)
            ),
            sparse_ids=torch.nn.functional.pad(distributions.sparse_ids, (0, 0, 0, 2), value=-1),
            sparse_probs=poisoned(
                distributions.sparse_probs, beyond | (distributions.kind != DistributionKind.SPARSE).unsqueeze(1)
            ),
        )
    rows = torch.cat((batch.logits, torch.full_like(batch.logits[:2], torch.nan)))
    padded = replace(batch, logits=rows, drafts=DraftRows(ids, drafts.lengths, distributions)).verify()
    assert torch.equal(padded.output_ids[:, : width + 1], plain.output_ids)
    assert (padded.output_ids[:, width + 1 :] == -1).all()
    assert torch.equal(padded.num_accepted, plain.num_accepted)
    assert torch.equal(padded.status, plain.status)


def poisoned(distribution: Tensor, where: Tensor) -> Tensor:
    wider = torch.nn.functional.pad(distribution, (0, 0, 0, 2))
    return wider.masked_fill(where.unsqueeze(2), torch.nan)


@some
@given(BATCHES)
def test_row_stride_offset_and_extra_columns_change_no_token(batch: Batch) -> None:
    rows, vocab = batch.logits.shape
    store = torch.full((rows + 1, vocab + 5), torch.nan, dtype=batch.logits.dtype)
    store[1:, 3 : 3 + vocab] = batch.logits
    strided = replace(batch, logits=store[1:, 3 : 3 + vocab])
    assert equal(strided.verify(), batch.verify())
    distributions = batch.drafts.distributions
    if distributions is None or distributions.t2d is None:
        wider = torch.nn.functional.pad(batch.logits, (0, 4), value=-torch.inf)
        assert torch.equal(replace(batch, logits=wider).verify().num_accepted, batch.verify().num_accepted)


@some
@given(BATCHES)
def test_inputs_are_not_modified(batch: Batch) -> None:
    before = [tensor.clone() for tensor in tensors_of(batch)]
    batch.verify()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(tensors_of(batch), before, strict=True))


@some
@given(BATCHES)
def test_host_facts_change_no_token(batch: Batch) -> None:
    slow = replace(batch.sampling, all_greedy=False, any_filter=True)
    left, right = replace(batch, sampling=slow).verify(), batch.verify()
    assert torch.equal(left.output_ids, right.output_ids)
    assert torch.equal(left.status, right.status)


@some
@given(BATCHES)
def test_distributions_tagged_one_hot_equal_no_distributions(batch: Batch) -> None:
    distributions = batch.drafts.distributions
    if distributions is None:
        return
    tagged = replace(batch.drafts, distributions=replace(distributions, kind=torch.zeros_like(distributions.kind)))
    without = replace(batch.drafts, distributions=None)
    assert equal(replace(batch, drafts=tagged).verify(), replace(batch, drafts=without).verify())


@some
@given(BATCHES)
def test_row_tagged_with_an_absent_distribution_is_one_hot(batch: Batch) -> None:
    distributions = batch.drafts.distributions
    if distributions is None:
        return
    absent = replace(
        batch.drafts, distributions=replace(distributions, draft_probs=None, draft_logits=None, sparse_probs=None)
    )
    assert equal(
        replace(batch, drafts=absent).verify(), replace(batch, drafts=replace(absent, distributions=None)).verify()
    )


@some
@given(BATCHES, st.integers(1, 40))
def test_lower_accept_uniforms_never_accept_fewer(batch: Batch, bits: int) -> None:
    uniforms = draw_uniforms(batch.drafts, batch.sampling)
    if uniforms.accept is None:
        return
    lower = Uniforms(uniforms.output, uniforms.accept * (1 - 2.0**-bits))
    assert (batch.verify(lower).num_accepted >= batch.verify(uniforms).num_accepted).all()


@some
@given(BATCHES)
def test_no_drafts_is_plain_sampling_with_the_same_seed(batch: Batch) -> None:
    busy = [b for b in range(batch.num_requests) if len(batch.rows(b))]
    if not busy:
        return
    one = select(batch, torch.tensor(busy))
    first = one.logits[one.cu_rows[:-1]]
    drafts = DraftRows(one.drafts.token_ids[:, :0], torch.zeros_like(one.drafts.lengths))
    without = replace(one, logits=first, cu_rows=torch.arange(len(busy) + 1), drafts=drafts).verify()
    assert equal(sample(first, one.sampling), without)


@some
@given(BATCHES)
def test_top_k_of_one_and_no_temperature_are_greedy_where_the_maximum_is_unique(batch: Batch) -> None:
    top = batch.logits.double().topk(min(2, batch.logits.shape[1])).values
    if top.shape[1] > 1 and (top[:, 0] == top[:, 1]).any():
        return
    s = batch.sampling
    drafts = replace(batch.drafts, distributions=None)
    one = replace(s, temperature=s.temperature.clamp(min=0.5), top_k=torch.ones_like(s.top_k))
    cold = replace(s, temperature=torch.zeros_like(s.temperature))
    frozen = replace(s, temperature=torch.full_like(s.temperature, 1e-30))
    sampled = [replace(like, all_greedy=False, any_filter=True) for like in (one, frozen)]
    for like in (*sampled, replace(cold, all_greedy=True, any_filter=False)):
        got = replace(batch, drafts=drafts, sampling=like).verify()
        want = replace(batch, drafts=drafts, sampling=replace(cold, all_greedy=False)).verify()
        assert torch.equal(got.output_ids, want.output_ids)
