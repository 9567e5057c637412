"""The Triton kernel of paged attention, compiled in all its forms before the first layer of a kind attends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ...attention import Pages, TreeMask
from ...attention_spec import AttentionSpec, Mode
from ..tree_masks import tree_masks
from . import kernel

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Queries of a request: with any number of heads that share a key, one of these selects each tile."""


@dataclass(frozen=True)
class LayerKind:
    """What a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    dim: int
    value_dim: int
    keys_stride: int
    values_stride: int
    block_size: int
    table_width: int
    max_keys: int
    mode: Mode
    spec: AttentionSpec  # without sinks
    sinks: torch.dtype | None
    tree: bool  # whether there is a mask; how wide it is selects no kernel


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, pages: Pages, spec: AttentionSpec) -> Tensor:
    """Compute `kernels.attention.attend_pages` by our kernel, whose tiles the first call asks for."""
    sinks = spec.sinks
    kind = LayerKind(
        device=query.device,
        dtype=query.dtype,
        num_heads=query.shape[1],
        num_kv_heads=keys.shape[1],
        dim=query.shape[2],
        value_dim=values.shape[2],
        keys_stride=keys.stride(0),
        values_stride=values.stride(0),
        block_size=pages.block_size,
        table_width=pages.block_table.shape[1],
        max_keys=pages.max_keys,
        mode=pages.mode,
        spec=spec if sinks is None else replace(spec, sinks=None),
        sinks=None if sinks is None else sinks.dtype,
        tree=pages.tree is not None,
    )
    compile_forms(kind)
    return kernel.attend_pages(query, keys, values, pages, spec)


@cache
def compile_forms(kind: LayerKind) -> None:
    """Attend with tiles of every size, keys in parts and whole. One request without queries asks: nothing is read."""
    table, numbers = (
        torch.zeros(shape, dtype=torch.int32, device=kind.device) for shape in ((1, kind.table_width), (2,))
    )
    keys, values = (
        torch.empty_strided((1, kind.num_kv_heads, dim), (stride, dim, 1), dtype=kind.dtype, device=kind.device)
        for dim, stride in ((kind.dim, kind.keys_stride), (kind.value_dim, kind.values_stride))
    )
    sinks = None if kind.sinks is None else torch.zeros(kind.num_heads, dtype=kind.sinks, device=kind.device)
    query = torch.zeros(SIZES[-1], kind.num_heads, kind.dim, dtype=kind.dtype, device=kind.device)
    tree = TreeMask(numbers[:1], *tree_masks(numbers[None, :1].long())) if kind.tree else None
    for most in SIZES:
        for max_keys in (kind.max_keys, 1):
            pages = Pages(table, numbers[:1], numbers, kind.block_size, most, max_keys, kind.mode, tree)
            kernel.attend_pages(query[:most], keys, values, pages, replace(kind.spec, sinks=sinks))
