"""Linear layers whose weights are also kept in oneDNN's blocked layout, for a handful of rows at a time on a CPU.

A plain fp32 `linear` repacks its weights in every call once it has more rows than a matrix-vector product takes. For
the few rows of a verification or a small batch that costs about as much as the product itself: 6 rows of a
768 x 32000 head took 15 ms plain and 8 ms packed on one core, 1 row 7 ms either way.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

FEWEST_PACKED_ROWS = 4
EXPECTED_ROWS = 8


class PackedLinear(nn.Module):
    """`nn.Linear` for inference in fp32 on a CPU: same weights and law, a second copy of them in blocks."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self.register_buffer(
            "packed",
            torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), EXPECTED_ROWS),
            persistent=False,
        )

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if input.numel() < FEWEST_PACKED_ROWS * input.shape[-1]:
            return linear(input, self.weight, self.bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return output


def packable_bytes(model: nn.Module) -> int:
    """What packing would cost: the size of all plain fp32 linear layers; 0 where oneDNN or fp32 is missing."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    return sum(layer.weight.nbytes for _, _, layer in _plain_linears(model))


def pack_linears(model: nn.Module) -> None:
    """Replace every plain fp32 linear layer of a model on the CPU by its packed form."""
    for parent, name, layer in _plain_linears(model):
        setattr(parent, name, PackedLinear(layer))


def _plain_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"
    ]
