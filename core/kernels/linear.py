"""Linear layers on a CPU, laid out for a handful of rows at a time.

A plain `linear` repacks its weights in every call once it has more rows than a matrix-vector product takes, which for
the few rows of a verification or a small batch costs about as much as the product itself. Two layouts avoid it:

* packed, in oneDNN's blocks. On Intel's processors a call costs 20 us more than a plain one in fp32, and one row gains
  nothing, so that only large weights are packed, and kept as they were for fewer rows. Elsewhere one row gains as well.
* turned, stored by input instead of by output, a view of the same shape: for small fp32 weights on Intel's processors.

In bfloat16 packing pays at every size where the processor multiplies bfloat16. Figures: decision 0005.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

FEWEST_PACKED_ROWS = 4
EXPECTED_ROWS = 8
FEWEST_PACKED_BYTES = 2**20


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU: the same law, weights in blocks, and as they were where those are needed."""

    packed: Tensor

    def __init__(self, plain: nn.Linear, fewest_rows: int = 1, *, keep: bool = False) -> None:
        """`keep`: whether the plain weights stay; with fewer rows than `fewest_rows` they serve."""
        super().__init__()
        self.bias = plain.bias
        self.plain = plain.weight if keep else None
        self._fewest_rows = fewest_rows
        self._num_outputs = plain.out_features
        blocks = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), EXPECTED_ROWS)
        self.register_buffer("packed", blocks, persistent=False)

    @property
    def weight(self) -> Tensor:
        """[out, in], for code that looks at it; a copy where the plain weights were not kept."""
        return self.packed.to_dense() if self.plain is None else self.plain

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.plain is not None and input.numel() < self._fewest_rows * input.shape[-1]:
            return linear(input, self.plain, self.bias)
        if type(input) is not Tensor:  # symbolic: it is being traced
            output: Tensor = torch.ops.specdec.packed_linear(input, self.packed, self.bias, self._num_outputs)
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


@dataclass(frozen=True)
class Packing:
    """Which plain linear layers a processor computes faster from packed weights."""

    bfloat16: bool  # all of them
    float32: bool  # all of them, for any number of rows; else the large ones, for FEWEST_PACKED_ROWS and more

    @classmethod
    def of_this_processor(cls) -> Packing:
        """By what it can multiply, and by whether torch's plain fp32 product, which is Intel's, was made for it."""
        found = torch.cpu.get_capabilities()
        narrow = bool(found.get("amx_bf16") or found.get("avx512_bf16"))
        return cls(bfloat16=narrow, float32=bool(found.get("avx2")) and "Intel" not in str(found.get("cpu_name")))

    def covers(self, layer: nn.Linear) -> bool:
        """Whether the layer is packed."""
        if layer.weight.dtype == torch.bfloat16:
            return self.bfloat16
        return self.float32 or _is_large(layer)

    def fewest_rows(self, layer: nn.Linear) -> int:
        """From how many rows on."""
        return FEWEST_PACKED_ROWS if layer.weight.dtype == torch.float32 and not self.float32 else 1


def packable_bytes(model: nn.Module, packing: Packing | None = None) -> int:
    """What packing would add where plain weights are dropped; 0 where oneDNN is missing."""
    return sum(found.layer.weight.nbytes for found in _packable(model, packing) if found.is_needed)


def pack_linears(model: nn.Module, packing: Packing | None = None, *, drop: bool = False) -> None:
    """Replace plain linear layers of a model on the CPU by their packed form, where that pays.

    Where oneDNN is missing all stay as they are. `packing`: None for what this processor gains by. `drop`: whether
    plain weights that nothing needs any more leave the model's parameters.
    """
    for found in _packable(model, packing):
        keep = found.is_needed or not drop
        setattr(found.parent, found.name, PackedLinear(found.layer, found.fewest_rows, keep=keep))


def turn_linears(model: nn.Module) -> None:
    """Store the weights of every small plain fp32 linear layer of a model on the CPU by input. A tied one is copied."""
    for _, _, layer in _plain_linears(model):
        if layer.weight.dtype == torch.float32 and not _is_large(layer):
            by_input = layer.weight.detach().t().contiguous()
            layer.weight = nn.Parameter(by_input.t(), requires_grad=False)


class _Packable(NamedTuple):
    parent: nn.Module
    name: str
    layer: nn.Linear
    fewest_rows: int
    is_needed: bool  # the plain weight: another module has it too, or few rows are multiplied by it


def _packable(model: nn.Module, packing: Packing | None) -> list[_Packable]:
    layers = _plain_linears(model)
    if not layers or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return []
    packing = packing or Packing.of_this_processor()
    uses = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    found: list[_Packable] = []
    for parent, name, layer in layers:
        if packing.covers(layer):
            fewest_rows = packing.fewest_rows(layer)
            found.append(_Packable(parent, name, layer, fewest_rows, fewest_rows > 1 or uses[id(layer.weight)] > 1))
    return found


def _is_large(layer: nn.Linear) -> bool:
    return layer.weight.nbytes >= FEWEST_PACKED_BYTES


def _plain_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and is_plain(layer.weight)
    ]


def is_plain(weight: Tensor) -> bool:
    """Not, for example, a tensor subclass that keeps quantised values and calls itself fp32."""
    on_cpu = weight.device.type == "cpu"
    return type(weight) is nn.Parameter and weight.dtype in (torch.float32, torch.bfloat16) and on_cpu
