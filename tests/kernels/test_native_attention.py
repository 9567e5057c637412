"""The attention kernel in C against PyTorch's in fp64."""

from __future__ import annotations

import pytest
import torch

from specdec.core.kernels.attention import Span, SpanBatch, attend_in_torch
from specdec.core.kernels.attention_spec import AttentionSpec
from specdec.core.kernels.cpu.native.kernels import NativeKernels

CPU = torch.device("cpu")
NUM_SLOTS = 900
MIXED = [(1, 30), (5, 9), (6, 6), (1, 2), (3, 200), (2, 65), (1, 64), (70, 130)]
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def native():
    return NativeKernels.load().attend


def batch_of(shapes, mode="causal", *, scattered=()):
    """Requests of (queries, keys) in slots of their own; those whose number is in `scattered` in no order."""
    order = torch.randperm(NUM_SLOTS - 560) + 560
    spans, query, first = [], 0, 3
    for index, (num_queries, num_keys) in enumerate(shapes):
        if index in scattered:
            own, order = order[:num_keys].clone(), order[num_keys:]
        else:
            own, first = slice(first, first + num_keys), first + num_keys + 5
        spans.append(Span(query, num_queries, num_keys, own, CPU, mode))
        query += num_queries
    return SpanBatch(tuple(spans))


def tensors(num_tokens, heads=(4, 2), dims=(64, 64), dtype=torch.float32):
    """Query, new keys and values, stored keys and values."""
    (num_heads, num_kv_heads), (key_dim, value_dim) = heads, dims
    shapes = [(num_tokens, num_heads, key_dim), (num_tokens, num_kv_heads, key_dim)]
    shapes += [(num_tokens, num_kv_heads, value_dim)]
    shapes += [(NUM_SLOTS, num_kv_heads, key_dim), (NUM_SLOTS, num_kv_heads, value_dim)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def num_tokens(batch):
    return batch.spans[-1].stop


def assert_equals_torch(native, batch, inputs, spec, tolerance=2e-5):
    """Outputs, and what is stored."""
    exact = [each.double() for each in inputs]
    stored = [each.clone() for each in inputs[3:]]
    found = native(*inputs[:3], *stored, batch, spec)
    expected = attend_in_torch(*exact, batch, spec)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    for mine, theirs in zip(stored, exact[3:], strict=True):
        assert torch.equal(mine.double(), theirs)


@pytest.mark.parametrize("mode", ["causal", "causal_block", "full_block"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 7, pytest.param(64, marks=FULL), 500], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1), pytest.param((10, 2), marks=FULL)], ids=str)
def test_equals_pytorch_in_double_precision(native, heads, window, softcap, mode):
    torch.manual_seed(0)
    batch = batch_of(MIXED, mode, scattered=(1, 4))
    assert_equals_torch(native, batch, tensors(num_tokens(batch), heads), AttentionSpec(0.2, window, softcap))


@pytest.mark.parametrize("mode", ["causal", "full_block"])
@pytest.mark.parametrize("chunk", [None, 1, 7, 500], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 1)], ids=str)
def test_sinks_and_chunks(native, heads, chunk, mode):
    torch.manual_seed(0)
    batch = batch_of(MIXED, mode, scattered=(1, 4))
    spec = AttentionSpec(0.2, chunk=chunk, sinks=torch.linspace(-2.0, 4.0, heads[0]))
    assert_equals_torch(native, batch, tensors(num_tokens(batch), heads), spec)


def test_new_keys_go_where_the_last_keys_of_their_requests_lie():
    batch = batch_of([(2, 5), (1, 3), (3, 3)], scattered=(1,))
    assert batch.slots.tolist() == [6, 7, int(batch.spans[1].slots[-1]), 13, 14, 15]
    assert batch_of([(2, 5)]).slots == slice(6, 8)


@pytest.mark.parametrize("dims", [(32, 32), (96, 96), (128, 128), (64, 128), (192, 128), (512, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_of_heads(native, dims, dtype):
    torch.manual_seed(0)
    batch = batch_of(MIXED, scattered=(0, 5))
    inputs = tensors(num_tokens(batch), dims=dims, dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 2**-8  # the output is rounded once
    assert_equals_torch(native, batch, inputs, AttentionSpec(dims[0] ** -0.5), tolerance)


@pytest.mark.parametrize(
    ("dims", "dtype"), [((8, 8), torch.float32), ((1024, 64), torch.float32), ((64, 64), torch.float16)], ids=str
)
def test_what_the_kernel_does_not_serve_is_pytorchs(native, dims, dtype):
    torch.manual_seed(0)
    batch = batch_of([(1, 9), (3, 12)])
    inputs, spec = tensors(4, dims=dims, dtype=dtype), AttentionSpec(0.2)
    stored = [each.clone() for each in inputs[3:]]
    assert torch.equal(native(*inputs[:3], *stored, batch, spec), attend_in_torch(*inputs, batch, spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_lie_apart(native, dtype):
    """As where one product makes queries, keys and values, or heads come before tokens."""
    torch.manual_seed(0)
    batch = batch_of(MIXED)
    count = num_tokens(batch)
    fused = torch.randn(count, 4 * 64 + 2 * 64 + 2 * 64).to(dtype)
    query, key, value = (part.view(count, -1, 64) for part in fused.split([256, 128, 128], dim=1))
    stored = tensors(count, dtype=dtype)[3:]
    apart = query, key.transpose(0, 1).contiguous().transpose(0, 1), value
    found = native(*apart, *(each.clone() for each in stored), batch, AttentionSpec(0.125))
    together = native(query.contiguous(), key.contiguous(), value.contiguous(), *stored, batch, AttentionSpec(0.125))
    assert torch.equal(found, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 9], ids=str)
def test_a_query_gives_the_same_bits_in_every_batch(native, window, heads, dtype):
    """Seven queries of a verification, one by one; other requests beside them; another number of threads."""
    torch.manual_seed(0)
    spec, first = AttentionSpec(0.125, window), 150
    batch = batch_of([(7, first + 7), (5, 9), (1, 300)], scattered=(1,))
    inputs = tensors(num_tokens(batch), heads, dtype=dtype)
    together = native(*inputs[:3], *inputs[3:], batch, spec)[:7]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        again = native(*inputs[:3], *inputs[3:], batch, spec)[:7]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again, together)
    own = batch.spans[0].slots.start
    for i in range(7):
        slots = slice(own, own + first + 1 + i)
        alone = SpanBatch((Span(0, 1, first + 1 + i, slots, CPU),))
        assert torch.equal(native(*(each[i : i + 1] for each in inputs[:3]), *inputs[3:], alone, spec)[0], together[i])


@pytest.mark.parametrize("left_behind", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize("window", [None, 3], ids=str)
def test_what_a_query_does_not_see_never_reaches_it(native, window, left_behind):
    """Beyond the request, before the window, and the drafts behind the query."""
    torch.manual_seed(0)
    spec, batch = AttentionSpec(0.125, window), batch_of([(1, 70), (5, 68)])
    query, keys, values, *clean = tensors(6)
    dirty = [torch.full_like(each, left_behind) for each in clean]
    for span in batch.spans:
        num_unseen = 0 if window is None else span.num_keys - span.num_queries - window
        seen = slice(span.slots.start + num_unseen, span.slots.stop)
        for first, second in zip(clean, dirty, strict=True):
            second[seen] = first[seen]
    expected = native(query, keys, values, *clean, batch, spec)
    assert torch.equal(native(query, keys, values, *dirty, batch, spec), expected)
    keys[-1], values[-1] = left_behind, left_behind  # the last draft
    assert torch.equal(native(query, keys, values, *dirty, batch, spec)[:-1], expected[:-1])


def test_scores_far_apart_neither_overflow_nor_vanish(native):
    torch.manual_seed(0)
    batch = batch_of(MIXED)
    query, keys, values, *stored = tensors(num_tokens(batch))
    thousands, spec = [query * 60, keys, values, *stored], AttentionSpec(1.0)
    assert_equals_torch(native, batch, thousands, spec, tolerance=1e-3)
    same = native(query * 0, keys, torch.ones_like(values), stored[0], torch.ones_like(stored[1]), batch, spec)
    torch.testing.assert_close(same, torch.ones_like(same), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_processors_with_less(lesser_kernels):
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2**-8)):
        batch = batch_of(MIXED, scattered=(1, 4))
        inputs = tensors(num_tokens(batch), dtype=dtype)
        assert_equals_torch(lesser_kernels.attend, batch, inputs, AttentionSpec(0.2, 40, 2.0), tolerance)


WRONG = {
    "fewer keys than queries": {1: (2, 2, 64)},
    "stored keys of fewer heads": {3: (NUM_SLOTS, 1, 64)},
    "stored values of smaller heads": {4: (NUM_SLOTS, 2, 32)},
    "heads that no keys belong to": {0: (3, 3, 64)},
    "queries larger than keys": {0: (3, 4, 128)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(native, wrong):
    inputs = [torch.ones(wrong.get(place, each.shape)) for place, each in enumerate(tensors(3))]
    held = [each._use_count() for each in inputs]
    with pytest.raises(RuntimeError, match="attend: "):
        native(*inputs, batch_of([(3, 9)]), AttentionSpec(0.125))
    assert all((each == 1).all() for each in inputs)
    assert [each._use_count() for each in inputs] == held, "nothing is kept"


def test_kernels_load_where_the_user_has_another_default_dtype(half_by_default):
    NativeKernels.load().check()
