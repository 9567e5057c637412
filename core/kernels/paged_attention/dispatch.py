"""Which implementation of paged attention serves a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..attention_spec import AttentionSpec
from . import Pages, naive

AttendPages = Callable[[Tensor, Tensor, Tensor, Pages, AttentionSpec], Tensor]


def _on_cuda(query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
    attend = _implementation(
        query.device,
        query.dtype,
        pages.block_size,
        pages.tree is None
        and query.shape[2] == values.shape[2]
        and all(each is None for each in (spec.softcap, spec.chunk, spec.sinks))
        and (spec.window is None or pages.mode == "causal"),
    )
    return attend(query, keys, values, pages, spec)


@cache
def _implementation(device: torch.device, dtype: torch.dtype, block_size: int, is_plain: bool) -> AttendPages:
    """PyTorch's own paged attention for plain layers where it has one; else the Triton kernel; else the plain form.

    `is_plain`: no tree, one head size, no softcap, chunk or sinks, no window over a block. Imported here because a CPU
    needs none of them.
    """
    from . import varlen

    if is_plain and varlen.is_served(device, dtype, block_size):
        return varlen.attend_pages
    if find_spec("triton") is None:  # it has wheels for Linux only
        return naive.attend_pages
    from . import warmed

    return warmed.attend_pages


PAGED_ATTENTION: dict[str, AttendPages] = {"cpu": naive.attend_pages, "cuda": _on_cuda}
"""The implementation for each device type; all have the distribution of `naive.attend_pages`."""
