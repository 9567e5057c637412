"""What computes attention over spans, and in which form the layers of a network are served: chosen once per device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeGuard

import torch
from torch import Tensor, nn

from .cpu.attention import attend_in_torch


class Backend:
    """PyTorch as it is, on any device: every layer stays in its own form."""

    attend: Callable[..., Tensor] = staticmethod(attend_in_torch)
    is_batch_invariant = False  # whether a row's bits do not depend on the rows beside it

    def serves_heads(self, dtype: torch.dtype, *sizes: int) -> bool:
        """Whether attention with heads of such sizes is batch-invariant."""
        return False

    def recurrences(self) -> Mapping[str, Callable[..., tuple[Tensor, Tensor]]]:
        """Operators that carry a state over few tokens, by name: as modelling code calls them."""
        return {}

    def fuse(self, network: nn.Module) -> None:
        """Join linear layers that read the same input, in place."""

    def narrow(self, network: nn.Module, keep: nn.Module | None) -> bool:
        """Store the weights of every linear layer but `keep` in int8, in place; or return False."""
        return False

    def lay_out(self, network: nn.Module, *, room: int | None, drop: bool) -> None:
        """Replace linear layers and norms in place by forms that are faster for a few rows at a time.

        room: the most bytes that second copies of weights may take. None means as many as there are. drop: whether
        first copies that nothing needs leave the network.
        """


def is_plain_linear(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a product with its weights is all that a layer computes: some quantise their input, and say so in a
    `forward` of their own."""
    return type(layer) is nn.Linear and "forward" not in vars(layer)
