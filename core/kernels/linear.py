"""Linear layers on a CPU, laid out for a handful of rows at a time.

A plain `linear` repacks its weights in every call once it has more rows than a matrix-vector product takes, which for
the few rows of a verification or a small batch costs about as much as the product itself. Two layouts avoid it in fp32:

* A large weight is also kept in oneDNN's blocks: 8 rows of a 768 x 32000 head took 15 ms plain and 7 ms packed on one
  core. A call costs 20 us more, and one row gains nothing.
* A small weight is stored by input instead of by output, a view of the same shape: 8 rows of the 56 layers of a small
  model took 1.9 ms plain, 2.4 ms packed and 1.3 ms turned; one row costs the same.

In bfloat16 a core with a matrix unit (AMX) gains by packing at every size: 1 and 8 rows of a 768 x 3072 layer took 659
and 631 us plain, 424 and 396 packed, and 729 and 1047 in packed fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

FEWEST_PACKED_ROWS = 4
EXPECTED_ROWS = 8
FEWEST_PACKED_BYTES = 2**20


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU: same weights and law, a second copy of them in blocks."""

    packed: Tensor

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self._fewest_rows = FEWEST_PACKED_ROWS if plain.weight.dtype == torch.float32 else 1
        self.register_buffer(
            "packed",
            torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), EXPECTED_ROWS),
            persistent=False,
        )

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if input.numel() < self._fewest_rows * input.shape[-1]:
            return linear(input, self.weight, self.bias)
        if torch.compiler.is_compiling():
            output: Tensor = torch.ops.specdec.packed_linear(input, self.packed, self.bias, len(self.weight))
            return output
        return _packed_linear(input, self.packed, self.bias)


def _packed_linear(input: Tensor, packed: Tensor, bias: Tensor | None, *num_outputs: int) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return output


def _shape_of_output(input: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], num_outputs)


# torch.compile knows the operator beneath for weights that it packed itself; ours hides it.
_operators = torch.library.Library("specdec", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "packed_linear(Tensor input, Tensor packed, Tensor? bias, int num_outputs) -> Tensor"
)
_operators.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specdec::packed_linear", _shape_of_output, lib=_operators)


def has_matrix_unit() -> bool:
    """Whether this processor multiplies blocks of bfloat16 (AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


def packable_bytes(model: nn.Module) -> int:
    """What packing would cost: the size of all layers that it pays for; 0 where oneDNN is missing."""
    return sum(layer.weight.nbytes for _, _, layer in _packable(model, has_matrix_unit()))


def pack_linears(model: nn.Module, *, bfloat16: bool | None = None) -> None:
    """Replace large plain fp32 linear layers of a model on the CPU by their packed form; in bfloat16 all plain ones.

    Where oneDNN is missing all stay as they are.
    `bfloat16`: whether those are packed too; None: if the processor has a matrix unit.
    """
    for parent, name, layer in _packable(model, has_matrix_unit() if bfloat16 is None else bfloat16):
        setattr(parent, name, PackedLinear(layer))


def turn_linears(model: nn.Module) -> None:
    """Store the weights of every small plain fp32 linear layer of a model on the CPU by input. A tied one is copied."""
    for _, _, layer in _plain_linears(model, torch.float32):
        if not _is_large(layer):
            by_input = layer.weight.detach().t().contiguous()
            layer.weight = nn.Parameter(by_input.t(), requires_grad=False)


def _packable(model: nn.Module, bfloat16: bool) -> list[tuple[nn.Module, str, nn.Linear]]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return []
    large = [found for found in _plain_linears(model, torch.float32) if _is_large(found[2])]
    return large + (_plain_linears(model, torch.bfloat16) if bfloat16 else [])


def _is_large(layer: nn.Linear) -> bool:
    return layer.weight.nbytes >= FEWEST_PACKED_BYTES


def _plain_linears(model: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and _is_plain(layer.weight, dtype)
    ]


def _is_plain(weight: Tensor, dtype: torch.dtype) -> bool:
    """Not, for example, a tensor subclass that keeps quantised values and calls itself fp32."""
    return type(weight) is nn.Parameter and weight.dtype == dtype and weight.device.type == "cpu"
