"""Paged attention by spans against attention written out in fp64, for every shape a batch can have."""

from __future__ import annotations

import pytest
import torch

from specdec.core.kernels.attention import (
    PADDING_KEYS,
    AttentionSpec,
    Span,
    SpanGroup,
    attend_by_span,
    group_spans,
)
from specdec.core.runner.kv_cache import lazy_zeros

CPU = torch.device("cpu")


def written_out(query, keys, values, spec):
    """[n, Hq, D], [T, Hkv, D], [T, Hkv, Dv] -> [n, Hq, Dv] in fp64; the queries are the last n positions."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("nhd,thd->hnt", query.double(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    positions = torch.arange(len(keys))
    distance = positions[-len(query) :, None] - positions
    hidden = distance < 0
    if spec.window is not None:
        hidden |= distance >= spec.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnt,thd->nhd", weights, values).float()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 4, 100], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [[(1, 9)], [(7, 7)], [(1, 1)], [(4, 11)], [(1, 30), (5, 9), (6, 6), (1, 2), (3, 33)]],
    ids=["decode", "prompt", "first token", "verify", "mixed"],
)
def test_equals_attention_written_out(shapes, window, softcap, heads):
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    keys, values = torch.randn(200, num_kv_heads, 16), torch.randn(200, num_kv_heads, 8)
    query = torch.randn(sum(n for n, _ in shapes), num_heads, 16)
    spec = AttentionSpec(0.3, window, softcap)
    order = torch.randperm(100) + 100
    spans, expected, start = [], [], 0
    for index, (num_queries, num_keys) in enumerate(shapes):
        adjacent = index % 2 == 0
        slots = slice(3 + 30 * index, 3 + 30 * index + num_keys) if adjacent else order[:num_keys]
        spans.append(Span(start, num_queries, num_keys, slots, CPU))
        expected.append(written_out(query[start : start + num_queries], keys[slots], values[slots], spec))
        start += num_queries
    found = attend_by_span(query, keys, values, spans, spec)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_slots_outside_a_span_are_never_read():
    keys, values = torch.full((50, 2, 8), torch.nan), torch.full((50, 2, 8), torch.nan)
    keys[10:14], values[10:14] = 1.0, 2.0
    span = Span(0, 2, 4, slice(10, 14), CPU)
    assert attend_by_span(torch.randn(2, 2, 8), keys, values, [span], AttentionSpec(1.0)).eq(2).all()


def spaced(lengths, num_queries=1, spacing=40, first=3, mode="causal"):
    """Spans of one batch whose keys start `spacing` slots apart."""
    return [
        Span(i * num_queries, num_queries, length, slice(first + i * spacing, first + i * spacing + length), CPU, mode)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 4, 100], ids=str)
@pytest.mark.parametrize("mode", ["causal", "causal_block", "full_block"])
@pytest.mark.parametrize("num_queries", [1, 4], ids=["decode", "verify"])
@pytest.mark.parametrize("lengths", [[9, 9, 9], [12, 30, 5, 21]], ids=["equal", "ragged"])
def test_a_group_equals_its_spans_one_by_one(lengths, num_queries, mode, window, softcap, heads):
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    keys, values = torch.randn(200, num_kv_heads, 16), torch.randn(200, num_kv_heads, 8)
    query = torch.randn(num_queries * len(lengths), num_heads, 16)
    spec = AttentionSpec(0.3, window, softcap)
    spans = spaced(lengths, num_queries, mode=mode)
    (group,) = group_spans(spans, 200)
    assert isinstance(group, SpanGroup)
    found = attend_by_span(query, keys, values, [group], spec)
    torch.testing.assert_close(found, attend_by_span(query, keys, values, spans, spec), atol=1e-5, rtol=1e-5)
    if mode == "causal":
        expected = [written_out(query[s.start : s.stop], keys[s.slots], values[s.slots], spec) for s in spans]
        torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("left_behind", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_lies_beyond_a_request_never_reaches_it(left_behind, num_queries, softcap):
    torch.manual_seed(0)
    clean = torch.zeros(200, 2, 8), torch.zeros(200, 2, 8)
    dirty = torch.full((200, 2, 8), left_behind), torch.full((200, 2, 8), left_behind)
    spans = spaced([5, 30, 11], num_queries)
    for span in spans:
        for first, second in zip(clean, dirty, strict=True):
            first[span.slots] = second[span.slots] = torch.randn(span.num_keys, 2, 8)
    query, spec = torch.randn(3 * num_queries, 4, 8), AttentionSpec(0.3, softcap=softcap)
    parts = group_spans(spans, 200)
    found = attend_by_span(query, *dirty, parts, spec)
    torch.testing.assert_close(found, attend_by_span(query, *clean, parts, spec), atol=1e-6, rtol=1e-5)


def sizes(parts):
    """How many requests each part serves; 0 for a span that stays one."""
    return [len(part.spans) if isinstance(part, SpanGroup) else 0 for part in parts]


def test_spans_are_grouped_while_their_keys_are_equally_spaced():
    spans = spaced([5, 6, 7, 8, 9])
    assert sizes(group_spans(spans, 200)) == [5]
    assert sizes(group_spans([*spans[:2], *spans[3:]], 200)) == [2, 2]
    assert sizes(group_spans(spans[::-1], 200)) == [1] * 5


def test_other_numbers_of_queries_other_modes_prompts_and_holes_part_a_group():
    spans = spaced([5] * 7)
    spans[2] = Span(2, 2, 5, spans[2].slots, CPU)
    spans[4] = Span(4, 1, 5, spans[4].slots, CPU, "full_block")
    spans[6] = Span(6, 1, 5, torch.arange(5), CPU)
    assert sizes(group_spans(spans, 300)) == [2, 1, 1, 1, 1, 0]
    assert sizes(group_spans(spaced([4, 4], num_queries=4), 200)) == [0, 0]


def test_a_group_ends_where_padding_costs_more_than_a_call():
    long = 20 + 2 * PADDING_KEYS
    assert sizes(group_spans(spaced([20, long], spacing=400), 1000)) == [2]
    assert sizes(group_spans(spaced([20, long + 1], spacing=400), 1000)) == [1, 1]


def test_a_group_never_reads_past_the_end_of_the_cache():
    spans = spaced([30, 20])
    assert sizes(group_spans(spans, 3 + 40 + 30)) == [2]
    assert sizes(group_spans(spans, 3 + 40 + 29)) == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_storage_is_zero_and_keeps_what_is_written(dtype):
    storage = lazy_zeros((1000, 3, 5), dtype)
    assert storage.shape == (1000, 3, 5)
    assert storage.dtype == dtype
    assert not storage.any()
    storage.index_copy_(0, torch.tensor([999]), torch.ones(1, 3, 5, dtype=dtype))
    assert storage.sum() == 15
