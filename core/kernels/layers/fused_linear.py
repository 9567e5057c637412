"""Linear layers that read the same input, computed by one product.

A layer of a small model is a handful of products of microseconds each, and each costs as long again to begin. Query,
key and value read the same rows, and so do gate and up: their weights are laid one behind the other, and whichever
layer is called first computes for all of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..backend import is_plain_linear

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
    """Join the plain linear layers of every group of a model, in place."""
    for parent in list(model.modules()):
        children = dict(parent.named_children())
        for names in GROUPS:
            layers = [child for name in names if is_plain_linear(child := children.get(name))]
            kinds = {(each.in_features, each.weight.dtype, each.bias is None) for each in layers}
            if len(layers) == len(names) and len(kinds) == 1:
                group = FusedGroup(layers)
                for place, name in enumerate(names):
                    setattr(parent, name, FusedLinear(group, place))


def _joined(parts: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)
