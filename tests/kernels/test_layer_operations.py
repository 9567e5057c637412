"""Operations of layers: the Triton kernels, interpreted, give what the plain forms give; and what waits is read once.

The interpreter cuts bfloat16 off where a device rounds it, so here float16 shows where results are rounded.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from specdec.core.kernels.cuda.layers import kernel
from specdec.core.kernels.cuda.layers.deferred import Activated, Addend, Deferred, Sum
from specdec.core.kernels.layers import naive

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
LAST_BIT = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture
def draw():
    g = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=g).to(dtype).to(DEVICE)


def assert_to_the_last_bit(found, expected):
    torch.testing.assert_close(found, expected, atol=0, rtol=LAST_BIT[expected.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 80, 1000])
def test_norms(size, dtype, draw):
    rows, gain = draw(5, size, dtype=dtype), draw(size)
    for own in (gain, gain.to(dtype)):
        assert_to_the_last_bit(kernel.rms_norm(rows, own, 1e-5), naive.rms_norm(rows, own, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_with_its_sum(dtype, draw):
    first, second, gain = draw(1, 5, 48, dtype=dtype), draw(1, 5, 48, dtype=dtype), draw(48, dtype=dtype)
    total, normal = kernel.add_rms_norm(first, second, gain, 1e-6)
    expected = naive.add_rms_norm(first, second, gain, 1e-6)
    assert torch.equal(total, expected[0])
    assert_to_the_last_bit(normal, expected[1])


@pytest.mark.parametrize("last", ["heads of a joined product", "every second number"])
def test_norms_of_views(last, draw):
    joined = draw(1, 3, 4 * 16 + 32, dtype=torch.float16)
    views = {"heads of a joined product": joined[..., 16:80].view(1, 3, 4, 16), "every second number": joined[..., ::2]}
    rows = views[last]
    gain = draw(rows.shape[-1])
    assert_to_the_last_bit(kernel.rms_norm(rows, gain, 1e-6), naive.rms_norm(rows, gain, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [24, 1100])
def test_gates(size, dtype, draw):
    gate, up = (8 * draw(1, 3, 2 * size)).to(dtype).split(size, dim=-1)
    assert_to_the_last_bit(kernel.silu_mul(gate, up), naive.silu_mul(gate, up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (20, 12)], ids=str)
def test_rotations_bit_by_bit_and_what_they_store(dims, dtype, draw):
    dim, value_dim = dims
    joined = draw(3, 4 * dim + 2 * dim + 2 * value_dim, dtype=dtype)
    query, keys, values = joined.split([4 * dim, 2 * dim, 2 * value_dim], dim=-1)
    query, keys, values = query.view(3, 4, dim), keys.view(3, 2, dim), values.view(3, 2, value_dim)
    cos, sin = draw(3, dim, dtype=dtype), draw(3, dim, dtype=dtype)
    for found, expected in zip(kernel.rotate(query, keys, cos, sin), naive.rotate(query, keys, cos, sin), strict=True):
        assert torch.equal(found, expected)
    slots = torch.tensor([5, 0, 7], device=DEVICE)
    stored = [[torch.zeros(9, 2, d, dtype=dtype, device=DEVICE) for d in dims] for _ in range(2)]
    found = kernel.rotate_and_store(query, keys, values, cos, sin, slots, *stored[0])
    assert torch.equal(found, naive.rotate_and_store(query, keys, values, cos, sin, slots, *stored[1]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*stored, strict=True))
    assert stored[0][0][slots].abs().sum() > 0


def test_a_sum_waits_for_its_norm_and_anybody_else_gets_its_values(draw):
    first, second = draw(2, 3), draw(2, 3)
    for total in (first + Addend(second), Addend(second) + first, torch.add(first, Addend(second))):
        assert type(total) is Sum
        assert total.is_waiting
        assert (total.shape, total.dtype, total.device) == (first.shape, first.dtype, first.device)
        assert total.is_waiting
        assert type(total[0]) is torch.Tensor
        assert torch.equal(total, first + second)
        assert not total.is_waiting


def test_sums_of_another_kind_do_not_wait(draw):
    values = draw(2, 3)
    for total in (Addend(values) + 1, draw(3) + Addend(values), torch.add(values, Addend(values), alpha=2)):
        assert type(total) is torch.Tensor
    narrow = values.bfloat16() + Addend(values)
    assert narrow.dtype == torch.float32
    assert torch.equal(2 + Addend(values), values + 2)


def test_an_addition_in_place_writes_to_the_values(draw):
    stream, added = draw(2, 3), draw(2, 3)
    expected = stream + added
    before = stream
    stream += Addend(added)
    assert stream is before
    assert torch.equal(stream, expected)


def test_a_result_that_waits_is_computed_once():
    calls = []
    result = Deferred(torch.zeros(2), lambda: calls.append(1) or torch.ones(2))
    assert torch.cat([result, result]).tolist() == [1, 1, 1, 1]
    assert result.sum() == 2
    assert len(calls) == 1


def test_an_activation_waits_for_its_product_and_is_itself_otherwise(draw):
    gate, up = draw(2, 3), draw(2, 3)
    waiting = Activated(gate, silu, lambda *both: ("by the kernel", *both))
    assert (waiting * up)[0] == (up * waiting)[0] == "by the kernel"
    assert torch.equal(waiting * 2, 2 * silu(gate))
    assert torch.equal(waiting * up[0], silu(gate) * up[0])


def test_code_beneath_pytorchs_functions_gets_values_too(draw):
    first, second = draw(2, 3), draw(2, 3)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(torch.neg(Sum(first, second)), -(first + second))


class Launches:
    """In the place of a kernel: counts."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None


def test_every_operation_is_one_launch(draw, monkeypatch):
    launches = Launches()
    for name in ("rms_norm_kernel", "silu_mul_kernel", "rotate_kernel"):
        monkeypatch.setattr(kernel, name, launches)
    rows, heads, values = draw(3, 16), draw(3, 4, 16), draw(3, 2, 16)
    kernel.rms_norm(rows, rows[0], 1e-6)
    kernel.rms_norm(heads[None], rows[0], 1e-6)
    kernel.add_rms_norm(rows, rows, rows[0], 1e-6)
    kernel.silu_mul(rows, rows)
    kernel.rotate(heads, values, rows, rows)
    kernel.rotate_and_store(heads, values, values, rows, rows, torch.arange(3), values, values)
    assert launches.grids == [(3,), (12,), (3,), (3, 1), (3, 6), (3, 8)]
