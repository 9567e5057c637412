"""Layers on a CPU: linear ones in the layouts that products of few rows read fastest, norms by our kernel.

PyTorch's `linear` repacks its weights in every call with more rows than a matrix-vector product takes, and spends more
time on beginning a small product than on computing it. Two forms avoid both (figures: decision 0021):

* `NativeLinear`, by our kernel in C.
* `PackedLinear`, by oneDNN: in bfloat16 where the processor multiplies matrices of it (AMX), which our kernel does not,
  or where our kernel is missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..backend import is_plain_linear
from ..layers.norm import Spelled
from .native.kernels import DTYPES, NativeKernels, shape_of_linear

EXPECTED_ROWS = 8  # oneDNN chooses its blocks by them


class LaidOutLinear(nn.Module):
    """`nn.Linear` for inference on a CPU, its weights in a layout of their own."""

    packed: Tensor

    def __init__(self, plain: nn.Linear, packed: Tensor, *, keep: bool) -> None:
        """`keep`: whether the plain weights stay, for others that share them."""
        super().__init__()
        self.bias = plain.bias
        self.plain = plain.weight if keep else None
        self._num_outputs = plain.out_features
        self.register_buffer("packed", packed, persistent=False)

    @property
    def weight(self) -> Tensor:
        """[out, in], for code that looks at it; a copy where the plain weights were not kept."""
        return self._unpacked() if self.plain is None else self.plain

    def _unpacked(self) -> Tensor:
        raise NotImplementedError


class NativeLinear(LaidOutLinear):
    """By our kernel. A row's result does not depend on the rows beside it."""

    def __init__(self, plain: nn.Linear, kernels: NativeKernels, *, keep: bool = False) -> None:
        super().__init__(plain, kernels.pack(plain.weight.detach()), keep=keep)
        self._multiply = kernels.linear
        wide = torch.empty(0) if plain.bias is None else plain.bias.detach().float()
        self.register_buffer("_wide_bias", wide, persistent=False)

    def _unpacked(self) -> Tensor:
        by_output = self.packed.transpose(1, 2).flatten(2)  # [panels, outputs, in]
        return by_output.flatten(0, 1)[: self._num_outputs]

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        output: Tensor = self._multiply(input.contiguous(), self.packed, self._wide_bias, self._num_outputs)
        return output


class PackedLinear(LaidOutLinear):
    """By oneDNN, weights in its blocks."""

    def __init__(self, plain: nn.Linear, *, keep: bool = False) -> None:
        blocks = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), EXPECTED_ROWS)
        super().__init__(plain, blocks, keep=keep)

    def _unpacked(self) -> Tensor:
        return self.packed.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if type(input) is not Tensor:  # symbolic: it is being traced
            output: Tensor = torch.ops.specdec.packed_linear(input, self.packed, self.bias, self._num_outputs)
            return output
        return _packed_linear(input, self.packed, self.bias)


class NativeRMSNorm(nn.Module):
    """By our kernel in C.

    A compiler gets the form that is spelled out, which it fuses with what is around it; so does input of another dtype
    than the weight's, which promotes as PyTorch says.
    """

    def __init__(self, spelled: Spelled, kernels: NativeKernels) -> None:
        super().__init__()
        self.weight = spelled.weight
        self.spelled = spelled
        self.register_buffer("wide_gain", spelled.gain.float().contiguous(), persistent=False)
        self._rounds_first = int(spelled.gain.dtype == torch.bfloat16)
        self._eps = spelled.eps.item()
        self._normalize = kernels.rms_norm

    def forward(self, input: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        output: Tensor
        if type(input) is not Tensor or input.dtype != self.weight.dtype:  # no plain tensor: it is being traced
            output = self.spelled(input)
        else:
            rows = input if input.stride(-1) == 1 else input.contiguous()
            output = self._normalize(rows, self.wide_gain, self._eps, self._rounds_first)
        return output


def _packed_linear(input: Tensor, packed: Tensor, bias: Tensor | None, *num_outputs: int) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return output


# torch.compile knows the operator beneath for weights that it packed itself; ours hides it.
_operators = torch.library.Library("specdec", "FRAGMENT")  # type: ignore[no-untyped-call]
_operators.define(  # type: ignore[no-untyped-call]
    "packed_linear(Tensor input, Tensor packed, Tensor? bias, int num_outputs) -> Tensor"
)
_operators.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("specdec::packed_linear", shape_of_linear, lib=_operators)


LinearForm = Callable[..., nn.Module]
"""Makes a form of a plain layer; takes `keep` as `LaidOutLinear` does."""

FormOf = Callable[[nn.Linear], LinearForm | None]
"""Chooses a layer's form. None means that the layer stays."""


def packable_bytes(model: nn.Module, form_of: FormOf) -> int:
    """What packing would add where plain weights are dropped."""
    return sum(found.layer.weight.nbytes for found in _packable(model, form_of) if found.is_shared)


def pack_linears(model: nn.Module, form_of: FormOf, *, drop: bool = False) -> None:
    """Replace plain linear layers of a model on the CPU by their forms.

    drop: whether plain weights that no other module has leave the model's parameters.
    """
    waiting = deque(_packable(model, form_of))
    while waiting:  # each layer goes when its packed form has come
        found = waiting.popleft()
        setattr(found.parent, found.name, found.form(found.layer, keep=found.is_shared or not drop))


class _Packable(NamedTuple):
    parent: nn.Module
    name: str
    layer: nn.Linear
    form: LinearForm
    is_shared: bool  # another module has the weight too


def _packable(model: nn.Module, form_of: FormOf) -> list[_Packable]:
    uses = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    found: list[_Packable] = []
    for parent in model.modules():
        for name, layer in parent.named_children():
            if not is_plain_linear(layer) or not is_plain(layer.weight):
                continue
            form = form_of(layer)
            if form is not None:
                found.append(_Packable(parent, name, layer, form, uses[id(layer.weight)] > 1))
    return found


def onednn_multiplies(weight: Tensor, *features: str) -> bool:
    """Whether a weight is bfloat16, and the processor has one of these features, by which oneDNN multiplies it."""
    if weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    processor = torch.cpu.get_capabilities()
    return any(processor.get(feature) for feature in features)


def is_plain(weight: Tensor) -> bool:
    """Not, for example, a tensor subclass that keeps quantised values and calls itself fp32."""
    return type(weight) is nn.Parameter and weight.dtype in DTYPES
