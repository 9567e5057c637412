"""Norms by the kernel in C compute what the forms that are spelled out do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec.core.kernels.cpu.layers import NativeRMSNorm
from specdec.core.kernels.layers.norm import FusedRMSNorm, WideRMSNorm

KINDS = {
    "fp32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "bfloat16, rounded before the gain": (torch.bfloat16, torch.bfloat16),
}
SHAPES = [(1, 1, 64), (2, 5, 3, 48), (4, 50), (7,), (3, 1), (0, 48), (2, 0, 3, 48), (1, 2, 3, 1, 2, 16)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # sums in another order may round to the neighbour


def norms_of(kind, size, kernels, eps=1e-5):
    dtype, gain_dtype = KINDS[kind]
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
    spelled = (FusedRMSNorm if dtype == torch.float32 else WideRMSNorm)(weight, weight.to(gain_dtype), eps)
    return NativeRMSNorm(spelled, kernels), spelled


def check(kind, shape, kernels):
    dtype, _ = KINDS[kind]
    native, spelled = norms_of(kind, shape[-1], kernels)
    for scale in (1e-4, 1.0, 1e3):
        rows = (scale * torch.randn(shape)).to(dtype)
        found, expected = native(rows), spelled(rows)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(found, expected, atol=0, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_form_that_is_spelled_out(kind, shape, kernels):
    check(kind, shape, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_processors_with_less(kind, lesser_kernels):
    for shape in ((2, 5, 3, 48), (4, 50), (7,)):
        check(kind, shape, lesser_kernels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_gives_the_same_bits_in_every_batch_and_place(kind, num_threads, kernels):
    native, _ = norms_of(kind, 256, kernels)
    rows = torch.randn(600, 3, 768).to(KINDS[kind][0])[..., 256:512]  # views that lie apart
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        together = native(rows)
        for other in (rows.contiguous(), rows.flip(0).flip(0), rows.transpose(0, 1).contiguous().transpose(0, 1)):
            assert torch.equal(native(other), together)
        assert torch.equal(torch.cat([native(each) for each in rows.split(7)]), together)
        assert torch.equal(native(rows.mT.contiguous().mT), together), "rows in pieces are put together"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in KINDS for dtype in (*TOLERANCE, torch.float16) if dtype != KINDS[kind][0]],
)
def test_input_of_another_dtype_promotes_as_before(kind, dtype, kernels):
    native, spelled = norms_of(kind, 48, kernels)
    rows = torch.randn(3, 48).to(dtype)
    found, expected = native(rows), spelled(rows)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_what_is_no_number_stays_in_its_row(kernels):
    native, _ = norms_of("fp32", 40, kernels)
    rows = torch.randn(3, 40)
    expected = native(rows)
    rows[1, 3] = torch.nan
    found = native(rows)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(
    ("rows", "gain", "reason"),
    [
        (torch.ones(3, 40).double(), torch.ones(40), "fp32 or bfloat16"),
        (torch.ones(3, 40), torch.ones(40).bfloat16(), "gains in fp32"),
        (torch.ones(3, 40), torch.ones(41), "a gain for each value"),
        (torch.ones(3, 80)[:, ::2], torch.ones(40), "rows in one piece"),
        (torch.tensor(1.0), torch.ones(1), "rows in one piece"),
    ],
    ids=["double", "narrow gain", "another size", "apart", "no row"],
)
def test_what_does_not_fit_is_refused(kernels, rows, gain, reason):
    held = rows._use_count()
    with pytest.raises(RuntimeError, match=f"rms_norm: .*{reason}"):
        kernels.rms_norm(rows, gain, 1e-5, 0)
    assert rows._use_count() == held, "nothing is kept"
