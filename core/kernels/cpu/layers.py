"""Layers on a CPU: linear ones in the layouts that products of few rows read fastest, norms and the delta rule in C.

PyTorch's `linear` repacks its weights in every call with more rows than a matrix-vector product takes, and spends more
time on beginning a small product than on computing it. Two forms avoid both (figures: decision 0021):

* `NativeLinear`, by our kernel in C.
* `PackedLinear`, by oneDNN: in bfloat16 where the processor multiplies matrices of it (AMX), which our kernel does not,
  or where our kernel is missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..backend import is_plain_linear
from ..layers.norm import Spelled
from .native.kernels import NativeKernels, shape_of_linear

EXPECTED_ROWS = 8  # oneDNN chooses its blocks by them
_MULTIPLES = 32, 16  # of inputs and outputs that torch's int8 product is made for: it reads past the end of others
_EPS = 1e-6  # of the norms of queries and keys, in all modelling code


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
    """A linear layer by our kernel. A row's result does not depend on the rows beside it."""

    def __init__(self, plain: nn.Linear, kernels: NativeKernels, *, keep: bool = False) -> None:
        super().__init__(plain, kernels.pack(plain.weight.detach()), keep=keep)
        self._multiply = kernels.linear
        wide = torch.empty(0, dtype=torch.float32) if plain.bias is None else plain.bias.detach().float()
        self.register_buffer("_wide_bias", wide, persistent=False)

    def _unpacked(self) -> Tensor:
        by_output = self.packed.transpose(1, 2).flatten(2)  # [panels, outputs, in]
        return by_output.flatten(0, 1)[: self._num_outputs]

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        output: Tensor = self._multiply(input.contiguous(), self.packed, self._wide_bias, self._num_outputs)
        return output


class PackedLinear(LaidOutLinear):
    """A linear layer by oneDNN, with weights in its blocks."""

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
    """An RMS norm by our kernel in C.

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
            if is_plain_linear(layer) and (form := form_of(layer)) is not None:
                found.append(_Packable(parent, name, layer, form, uses[id(layer.weight)] > 1))
    return found


def onednn_multiplies(weight: Tensor, *features: str) -> bool:
    """Whether a weight is bfloat16, and the processor has one of these features, by which oneDNN multiplies it."""
    if weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    processor = torch.cpu.get_capabilities()
    return any(processor.get(feature) for feature in features)


class Int8Linear(nn.Module):
    """`nn.Linear` for inference: symmetric int8 weights, products of bfloat16 inputs summed in fp32.

    What a CPU pays for in decoding is reading weights. One row of a 768 x 3072 layer took 590 us in fp32, 160 us in
    bfloat16 and 75 us so, on one core; eight rows took 900, 260 and 270 us. With hundreds of rows it is as fast as
    fp32. A row's result does not depend on the rows beside it. For one row of such layers torchao's weight-only int8,
    uncompiled, takes four times as long in fp32 and seven times in bfloat16.
    """

    narrow: Tensor  # [out, in] int8
    scale: Tensor  # [out] bfloat16; the weights are rounded to it, so that it costs no precision

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        weight = plain.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
        narrow = (weight / scale[:, None].float()).round_().clamp_(-127, 127).to(torch.int8)
        self.register_buffer("narrow", narrow)
        self.register_buffer("scale", scale)
        self.bias = plain.bias
        self._dtype = plain.weight.dtype
        self._fits = all(size % multiple == 0 for size, multiple in zip(weight.t().shape, _MULTIPLES, strict=True))

    @property
    def weight(self) -> Tensor:
        """[out, in], as they count, in the dtype of the layer that was replaced: for code that looks at it."""
        return (self.narrow.float() * self.scale[:, None].float()).to(self._dtype)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of the input."""
        rows = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
        if self._fits:
            output = torch._weight_int8pack_mm(rows, self.narrow, self.scale)
        else:
            output = linear(rows, self.narrow.to(torch.bfloat16)) * self.scale
        output = output.to(input.dtype).view(*input.shape[:-1], output.shape[-1])
        return output if self.bias is None else output + self.bias


def narrow_linears(network: nn.Module, keep: nn.Module | None) -> None:
    """Replace every linear layer of a network on the CPU, but `keep`, by its int8 form."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if is_plain_linear(layer) and layer is not keep:
                setattr(parent, name, Int8Linear(layer))


def delta_rule(
    kernels: NativeKernels,
    query: Tensor,  # [B, N, heads, D], or fewer heads, each for as many adjacent ones of the values
    key: Tensor,  # as query
    value: Tensor,  # [B, N, heads, Dv]
    g: Tensor,  # [B, N, heads], logarithms of decays
    beta: Tensor,  # [B, N, heads]
    initial_state: Tensor | None = None,  # [B, heads, D, Dv]
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """A delta rule in C, in fp32: outputs [B, N, heads, Dv], and the state after them. The initial one is changed in
    place where it is fp32.
    """
    if query.shape[2] != value.shape[2]:
        query, key = (each.repeat_interleave(value.shape[2] // each.shape[2], dim=2) for each in (query, key))
    inputs = [each.float().contiguous() for each in (query, key, value, g, beta)]
    if initial_state is None:
        shape = *query.shape[:1], *query.shape[2:], value.shape[3]
        state = torch.zeros(shape, dtype=torch.float32, device=query.device)
    else:
        state = initial_state.float().contiguous()
    output: Tensor = kernels.delta_rule(*inputs, state, _EPS, int(use_qk_l2norm_in_kernel))
    return output.to(query.dtype), state
