"""The operations of layers that a device may have a kernel for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

from torch import Tensor

from . import naive


class LayerKernels(Protocol):
    """See the functions of these names in `naive`."""

    def rms_norm(self, rows: Tensor, gain: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, first: Tensor, second: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def rotate(self, query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...

    def rotate_and_store(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        stored_keys: Tensor,
        stored_values: Tensor,
    ) -> Tensor: ...


def _of_cuda() -> LayerKernels:
    """In Triton; in plain torch where there is no triton, which has wheels for Linux only."""
    if find_spec("triton") is None:
        return naive
    from . import kernel  # imported here because a CPU needs none of it

    return kernel


LAYER_KERNELS: dict[str, Callable[[], LayerKernels]] = {"cuda": _of_cuda}
"""Makes the operations of each device type; all compute what `naive` does, but for the last bit."""
