"""Queries over a cache in blocks, for the tests of paged attention."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core.kernels.attention import Pages

BLOCK_SIZE = 4
HEADS = {"mha": (2, 2), "gqa": (6, 2), "mqa": (3, 1)}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Inputs = tuple[Tensor, Tensor, Tensor, Pages]


def inputs(
    shapes, *, heads="gqa", dims=(24, 24), dtype=torch.float32, mode="causal", max_keys=0, block_size=BLOCK_SIZE
) -> Inputs:
    """Random queries and a cache in which (num_queries, num_keys) requests lie in shuffled blocks, NaN between them."""
    g = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = HEADS[heads]
    width = max(1, *(-(-t // block_size) for _, t in shapes))
    order = torch.randperm(width * len(shapes) + 1, generator=g)
    table = order[: width * len(shapes)].view(len(shapes), width).int()
    num_slots = len(order) * block_size
    keys, values = (torch.full((num_slots, num_kv_heads, dim), torch.nan) for dim in dims)
    for row, (_, num_keys) in zip(table, shapes, strict=True):
        position = torch.arange(num_keys)
        slots = row[position // block_size].long() * block_size + position % block_size
        for stored in (keys, values):
            stored[slots] = torch.randn(num_keys, *stored.shape[1:], generator=g)
    query = torch.randn(sum(n for n, _ in shapes), num_heads, dims[0], generator=g)
    pages = Pages(
        block_table=table.to(DEVICE),
        num_keys=torch.tensor([t for _, t in shapes], dtype=torch.int32, device=DEVICE),
        cu_queries=torch.tensor([0] + [n for n, _ in shapes], device=DEVICE).cumsum(0).int(),
        block_size=block_size,
        max_queries=max(n for n, _ in shapes),
        max_keys=max_keys or width * block_size,
        mode=mode,
    )
    return *(each.to(DEVICE, dtype) for each in (query, keys, values)), pages
