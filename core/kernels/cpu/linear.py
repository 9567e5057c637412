"""Linear layers on a CPU: those that read the same input joined, in the layouts that products of few rows read fastest.

A layer of a small model is a handful of products of microseconds each, and each costs as long again to begin. Query,
key and value read the same rows, and so do gate and up. So their weights are laid one behind the other.

PyTorch's `linear` repacks its weights in every call with more rows than a matrix-vector product takes, and spends more
time on beginning a small product than on computing it. Two forms avoid both (figures: decision 0022):

* `NativeLinear`, by our kernel in C.
* `PackedLinear`, by oneDNN: in bfloat16 where the processor multiplies matrices of it (AMX), which our kernel does not,
  or where our kernel is missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..backend import is_plain_linear
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


GROUPS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Sibling layers in the order of their calls, by the names that transformers gives them."""


@dataclass
class _Computed:
    """What a group computed and has not handed out, by place."""

    input: Tensor | None = None
    outputs: dict[int, Tensor] = field(default_factory=dict)


class FusedGroup(nn.Module):
    """The product of a group of layers; `nn.Linear` until it is replaced by another form."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.product = nn.Linear(layers[0].in_features, sum(self.sizes), device="meta")
        self.product.weight = _joined([layer.weight for layer in layers])
        self.product.bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])
        self.computed = _Computed()


class FusedLinear(nn.Module):
    """`nn.Linear` for inference: one layer of a group. Its input must not be written to between the group's calls."""

    def __init__(self, group: FusedGroup, place: int) -> None:
        super().__init__()
        self.group = group
        self._computed = group.computed
        self._place = place
        stop = list(accumulate(group.sizes))[place]
        self._rows = slice(stop - group.sizes[place], stop)

    @property
    def weight(self) -> Tensor:
        """[out, in], for code that looks at it."""
        return self.group.product.weight[self._rows]

    @property
    def bias(self) -> Tensor | None:
        """[out]."""
        bias = self.group.product.bias
        return None if bias is None else bias[self._rows]

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], a view. Whichever layer of the group is called first computes for all of them."""
        computed = self._computed
        if computed.input is not input or self._place not in computed.outputs:
            computed.outputs = dict(enumerate(self.group.product(input).split(self.group.sizes, dim=-1)))
            computed.input = input
        output = computed.outputs.pop(self._place)
        if not computed.outputs:
            computed.input = None
        return output


def fuse_linears(model: nn.Module) -> None:
    """Join the plain linear layers of every group of a model on the CPU, in place."""
    for parent in list(model.modules()):
        children = dict(parent.named_children())
        for names in GROUPS:
            layers = [child for name in names if is_plain_linear(child := children.get(name))]
            if len(layers) == len(names) and _can_join(layers):
                group = FusedGroup(layers)
                for place, name in enumerate(names):
                    setattr(parent, name, FusedLinear(group, place))


def _can_join(layers: Sequence[nn.Linear]) -> bool:
    """Whether their weights are plain ones of one kind."""
    kinds = {(each.in_features, each.weight.dtype, each.bias is None) for each in layers}
    return len(kinds) == 1 and all(is_plain(layer.weight) for layer in layers)


def _joined(parts: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)
