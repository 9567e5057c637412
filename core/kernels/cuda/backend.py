"""The backend of a GPU without Triton: fewer products, block tables on the device, and captured passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ..attention import attend_pages
from ..backend import Backend, Form
from ..layers.fused_linear import fuse_linears
from .addressing import DeviceAddressing
from .graphs import Passes
from .paged_attention import LibraryOr


class CudaBackend(Backend):
    """PyTorch's products, and fewer of them."""

    attend_pages: ClassVar[Callable[..., Tensor]] = LibraryOr("PyTorch, request by request", attend_pages)
    addressing: ClassVar[Form | None] = DeviceAddressing
    passes: ClassVar[Any] = Passes

    def fuse(self, network: nn.Module) -> None:
        fuse_linears(network)
