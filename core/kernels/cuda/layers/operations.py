"""The operations of layers that a device may have a kernel for."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LayerKernels(Protocol):
    """See the functions of these names in `kernels.layers.naive`."""

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
