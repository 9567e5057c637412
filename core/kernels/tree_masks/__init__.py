"""Which nodes lie on the path to each node of a tree, as attention reads it: which form serves a device.

Of parents int64 [B, W], W at most 64: (ancestors [B, W] int64, whose bit j says that node j lies on the path, itself
included; depths [B, W] int32, the number of these nodes). A parent that is no earlier node stands for the root.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from . import naive

TreeMasks = Callable[[Tensor], tuple[Tensor, Tensor]]


@cache
def _of_a_device() -> TreeMasks:
    """One launch, where triton is installed. Imported here because a CPU needs none of it."""
    if find_spec("triton") is None:
        return naive.tree_masks
    from . import kernel

    return kernel.tree_masks


def _on_cuda(parents: Tensor) -> tuple[Tensor, Tensor]:
    return _of_a_device()(parents)


TREE_MASKS: dict[str, TreeMasks] = {"cpu": naive.tree_masks, "cuda": _on_cuda}
