"""The uniforms of a step's drafts, all of them at once: which form serves a device.

Of `count` draws for each of B requests: float64 [count, B], number i for a request's draft token at index i. They are
those of `philox.uniform`, bit for bit, on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from . import naive

DraftUniforms = Callable[[Tensor, Tensor, int], Tensor]


@cache
def _of_a_device() -> DraftUniforms:
    """One launch, where triton is installed. Imported here because a CPU needs none of it."""
    if find_spec("triton") is None:
        return naive.draft_uniforms
    from . import kernel

    return kernel.draft_uniforms


def _on_cuda(keys: Tensor, positions: Tensor, count: int) -> Tensor:
    return _of_a_device()(keys, positions, count)


DRAFT_UNIFORMS: dict[str, DraftUniforms] = {"cpu": naive.draft_uniforms, "cuda": _on_cuda}
