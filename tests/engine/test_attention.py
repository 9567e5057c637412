"""PyTorch's attention by spans against attention written out in fp64, for every shape a batch can have."""

from __future__ import annotations

import pytest
import torch

from specdec.core.device_memory import lazy_zeros
from specdec.core.kernels.attention import AttentionSpec, Span, attend_by_span

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_storage_is_zero_and_keeps_what_is_written(dtype):
    storage = lazy_zeros((1000, 3, 5), dtype, torch.device("cpu"))
    assert storage.shape == (1000, 3, 5)
    assert storage.dtype == dtype
    assert not storage.any()
    storage.index_copy_(0, torch.tensor([999]), torch.ones(1, 3, 5, dtype=dtype))
    assert storage.sum() == 15
