"""Attention over blocks on a GPU: the forms there are, and the one that serves a layer."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ...attention import Pages
from ...attention_spec import AttentionSpec
from . import varlen

logger = logging.getLogger("specdec")

AttendPages = Callable[[Tensor, Tensor, Tensor, Pages, AttentionSpec], Tensor]
Kind = tuple[torch.device, torch.dtype, int, int, bool]
"""Device, dtype, block size, head size, and whether a layer is plain."""


class LibraryOr:
    """`kernels.attention.attend_pages` by a library's form for the layers that it serves, else by another form."""

    def __init__(self, name: str, attend: AttendPages) -> None:
        """`name`: of the other form, for the log."""
        self._name, self._attend = name, attend
        self._serving: dict[Kind, AttendPages] = {}

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        is_plain = (
            pages.tree is None
            and query.shape[2] == values.shape[2]
            and all(each is None for each in (spec.softcap, spec.chunk, spec.sinks))
            and (spec.window is None or pages.mode == "causal")
        )
        kind = query.device, query.dtype, pages.block_size, query.shape[2], is_plain
        attend = self._serving.get(kind) or self._choose(kind)
        return attend(query, keys, values, pages, spec)

    def _choose(self, kind: Kind) -> AttendPages:
        """What serves such layers. It is said in the log, once for each kind of layer."""
        *place, is_plain = kind
        by_library = is_plain and varlen.is_served(*place)
        self._serving[kind] = varlen.attend_pages if by_library else self._attend
        name = varlen.NAME if by_library else self._name
        layers = f"{'plain' if is_plain else 'other'} layers with heads of {kind[3]}"
        logger.info("%s in %s on %s attend by %s", layers, kind[1], kind[0], name)
        return self._serving[kind]
