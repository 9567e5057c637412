"""The Triton kernel of paged attention, compiled in all its forms before the first layer of a kind attends."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ...attention import Pages
from ...attention_spec import AttentionSpec
from . import kernel

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Queries of a request: with any number of heads that share a key, one of these selects each tile."""


class Warmed:
    """`kernels.attention.attend_pages` by our kernel; the first layer of a kind asks for all tiles of its kind."""

    def __init__(self) -> None:
        self._compiled: set[Hashable] = set()  # kinds of layers

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
        kind = (
            *(query.device, query.dtype, query.shape[1:]),
            *(keys.shape[1:], keys.stride(0), values.shape[1:], values.stride(0)),
            *(pages.block_size, pages.block_table.shape[1], pages.max_keys, pages.mode, pages.tree is None),
            *(spec.window, spec.softcap, spec.chunk, None if spec.sinks is None else spec.sinks.dtype),
        )
        if kind not in self._compiled:
            self._compiled.add(kind)
            compile_forms(query, keys, values, pages, spec)
        return kernel.attend_pages(query, keys, values, pages, spec)


def compile_forms(query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> None:
    """Attend with tiles of every size, keys in parts and whole. One request without queries asks: nothing is read."""
    zeros = torch.zeros(2, dtype=torch.int32, device=query.device)
    nobody = replace(pages, block_table=pages.block_table[:1], num_keys=zeros[:1], cu_queries=zeros)
    queries = query.new_zeros(SIZES[-1], *query.shape[1:])
    for most, max_keys in product(SIZES, (pages.max_keys, 1)):
        asked = replace(nobody, max_queries=most, max_keys=max_keys)
        kernel.attend_pages(queries[:most], keys, values, asked, spec)
