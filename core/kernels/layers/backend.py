"""The forms in which a GPU computes the layers of a network."""

from __future__ import annotations

from torch import nn

from ..backend import Backend
from .fused_linear import fuse_linears
from .fusion import fuse_layers
from .operations import LAYER_KERNELS, LayerKernels


class GpuBackend(Backend):
    """PyTorch's products, fewer of them, and our kernels between them."""

    def __init__(self, kernels: LayerKernels | None = None) -> None:
        """`kernels`: None means the device's own."""
        self._kernels = LAYER_KERNELS["cuda"]() if kernels is None else kernels

    def fuse(self, network: nn.Module) -> None:
        """See `Backend`."""
        fuse_linears(network)

    def lay_out(self, network: nn.Module, *, room: int | None, drop: bool) -> None:
        """See `Backend`. There are no second copies."""
        fuse_layers(network, self._kernels)
