"""Packed linear layers compute what plain ones do, and are used where memory allows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec import LLM
from specdec.core.kernels.linear import FEWEST_PACKED_ROWS, PackedLinear, pack_linears, packable_bytes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (1, 4), (2, 2), (1, 33), (7,), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("size", [(5, 3), (64, 130), (256, 640)], ids=str)
def test_packed_equals_plain(shape, bias, size):
    torch.manual_seed(0)
    plain = nn.Linear(*size, bias=bias).eval()
    values = torch.randn(*shape, size[0])
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(values), plain(values), atol=1e-5, rtol=1e-5)


def test_only_plain_fp32_layers_are_packed():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4), nn.Linear(4, 4).bfloat16(), nn.Sequential(nn.Linear(4, 2)))
    assert packable_bytes(model) == 4 * (16 + 8)
    pack_linears(model)
    assert [type(layer) for layer in model[:3]] == [PackedLinear, Special, nn.Linear]
    assert type(model[3][0]) is PackedLinear
    assert packable_bytes(model) == 0


def test_target_is_packed_in_fp32_only_and_keeps_its_tied_weights():
    target = LLM("tiny", max_model_len=64).engine.parts.target.model
    assert type(target.get_output_embeddings()) is PackedLinear
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
    half = LLM("tiny", max_model_len=64, dtype="bfloat16").engine.parts.target.model
    assert type(half.get_output_embeddings()) is nn.Linear


def test_few_rows_stay_matrix_vector_products():
    plain = nn.Linear(64, 32).eval()
    packed = PackedLinear(plain)
    values = torch.randn(FEWEST_PACKED_ROWS - 1, 64)
    with torch.inference_mode():
        assert torch.equal(packed(values), plain(values))
