"""The backend of a GPU with Triton, by which ROCm is served too."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..backend import Form, Unavailable
from ..layers.norm import fuse_rms_norms
from .backend import CudaBackend
from .draft_uniforms import draft_uniforms
from .paged_attention import LibraryOr
from .paged_attention.warmed import Warmed
from .path_move import move_paths
from .rms_norm import KernelRMSNorm
from .tree_masks import tree_masks
from .verification import verify
from .warm_up import warm_up_verification
from .workspace import Workspace


class TritonBackend(CudaBackend):
    """Our kernels wherever there is one."""

    attend_pages: ClassVar[Callable[..., Tensor]] = LibraryOr("our kernel in Triton", Warmed())
    tree_masks: ClassVar[Form] = staticmethod(tree_masks)
    move_paths: ClassVar[Form] = staticmethod(move_paths)
    draft_uniforms: ClassVar[Callable[..., Tensor]] = staticmethod(draft_uniforms)
    verify: ClassVar[Form | None] = staticmethod(verify)
    plan_verification: ClassVar[Form | None] = Workspace.plan
    warm_up_verification: ClassVar[Form | None] = staticmethod(warm_up_verification)

    @classmethod
    def require(cls) -> None:
        """Launch a kernel: Triton needs a compiler for that, and a driver that knows its code."""
        if not torch.cuda.is_available():
            return
        try:
            one = torch.ones(1, dtype=torch.int64, device="cuda")
            cls.draft_uniforms(one, one, 1)
        except Exception as error:  # whatever a compiler, a linker and a driver raise
            raise Unavailable(f"a kernel of Triton does not run: {type(error).__name__}: {error}") from error

    def lay_out(self, network: nn.Module, *, room: int | None, drop: bool) -> None:
        """Keep the network as it is: there are no second copies."""
        fuse_rms_norms(network, KernelRMSNorm)
