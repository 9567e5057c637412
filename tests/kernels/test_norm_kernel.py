"""The Triton kernel of norms, interpreted, gives what the form that is spelled out gives, in one launch.

The interpreter cuts bfloat16 off where a device rounds it, so here float16 shows where results are rounded.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec.core.kernels.cuda import rms_norm as norms
from specdec.core.kernels.cuda.rms_norm import KernelRMSNorm
from specdec.core.kernels.layers.norm import WideRMSNorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
LAST_BIT = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture
def draw():
    g = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=g).to(dtype).to(DEVICE)


def both(rows, weight, gain):
    spelled = WideRMSNorm(nn.Parameter(weight, requires_grad=False), gain, 1e-5)
    return KernelRMSNorm(spelled)(rows), spelled(rows)


def assert_to_the_last_bit(found, expected):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=0, rtol=LAST_BIT[expected.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 80, 1000])
def test_norms(size, dtype, draw):
    rows, gain = draw(5, size, dtype=dtype), draw(size)
    for own in (gain, gain.to(dtype)):
        assert_to_the_last_bit(*both(rows, gain.to(dtype), own))


@pytest.mark.parametrize("last", ["heads of a joined product", "every second number"])
def test_norms_of_views(last, draw):
    joined = draw(1, 3, 4 * 16 + 32, dtype=torch.float16)
    views = {"heads of a joined product": joined[..., 16:80].view(1, 3, 4, 16), "every second number": joined[..., ::2]}
    gain = draw(views[last].shape[-1])
    assert_to_the_last_bit(*both(views[last], gain.half(), gain))


def test_input_of_another_dtype_takes_the_form_that_is_spelled_out(draw, monkeypatch):
    monkeypatch.setattr(norms, "rms_norm", None)
    gain = draw(16, dtype=torch.float16)
    found, expected = both(draw(2, 16), gain, gain)
    assert torch.equal(found, expected)


class Launches:
    """In the place of a kernel: counts."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None


def test_a_norm_is_one_launch(draw, monkeypatch):
    launches = Launches()
    monkeypatch.setattr(norms, "rms_norm_kernel", launches)
    rows, heads = draw(3, 16), draw(3, 4, 16)
    norms.rms_norm(rows, rows[0], 1e-6)
    norms.rms_norm(heads[None], rows[0], 1e-6)
    assert launches.grids == [(3,), (12,)]
