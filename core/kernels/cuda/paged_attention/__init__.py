"""Attention over blocks on a GPU: the forms there are, and the one that serves a layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from ... import attention as plain
from ...attention import Pages
from ...attention_spec import AttentionSpec
from . import varlen

logger = logging.getLogger("specdec")

AttendPages = Callable[[Tensor, Tensor, Tensor, Pages, AttentionSpec], Tensor]


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
    """Serve `kernels.attention.attend_pages` by the best form for the device."""
    is_plain = (
        pages.tree is None
        and query.shape[2] == values.shape[2]
        and all(each is None for each in (spec.softcap, spec.chunk, spec.sinks))
        and (spec.window is None or pages.mode == "causal")
    )
    attend = _serving(query.device, query.dtype, pages.block_size, is_plain)
    return attend(query, keys, values, pages, spec)


@cache
def _serving(device: torch.device, dtype: torch.dtype, block_size: int, is_plain: bool) -> AttendPages:
    """The first form that serves such layers. It is said in the log, once for each kind of layer.

    is_plain: no tree, one head size, no softcap, chunk or sinks, no window over a block.
    """
    name, attend = next(_forms(device, dtype, block_size, is_plain))
    logger.info("%s layers in %s on %s attend by %s", "plain" if is_plain else "other", dtype, device, name)
    return attend


def _forms(
    device: torch.device, dtype: torch.dtype, block_size: int, is_plain: bool
) -> Iterator[tuple[str, AttendPages]]:
    """Yield the forms that can serve, the best first: a library's, then our kernel, then PyTorch request by request."""
    if is_plain and varlen.is_served(device, dtype, block_size):
        yield varlen.NAME, varlen.attend_pages
    try:
        from . import warmed
    except ImportError:  # triton has wheels for Linux only
        yield "PyTorch, request by request", plain.attend_pages
    else:
        yield "our kernel in Triton", warmed.attend_pages
