"""A network's weights laid out for inference on a CPU."""

from __future__ import annotations

from torch import nn

from .linear import pack_linears
from .native.kernels import NativeKernels
from .norm import fuse_rms_norms


def arrange_for_cpu(network: nn.Module, kernels: NativeKernels | None, *, pack: bool, drop: bool) -> None:
    """Replace linear layers and norms in place by forms that are faster for a few rows at a time.

    `pack` allows second copies of weights, in another layout; `drop` leaves no first one where nothing needs it.
    """
    if pack:
        pack_linears(network, kernels, drop=drop)
    fuse_rms_norms(network, kernels)
