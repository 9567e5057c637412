"""Passes over nobody's tokens, before any request waits for what they compile on a device."""

from __future__ import annotations

import torch

from ..cache.block_table import BlockTable
from ..cache.kv_cache import KVCache
from ..cache.paged_view import PagedView, TreeRows
from ..model.forward_input import ForwardInput
from ..model.target import Target


def warm_up_target(target: Target, cache: KVCache, table: BlockTable, num_nodes: int = 0) -> None:
    """Compute two tokens, then one, of the row that no request has. Each kind of layer compiles its kernels.

    Layers that keep a state compute them as a new text, and keep nothing. num_nodes: the most of a tree; then also
    with a node.
    """
    for num_tokens, nodes in ((2, 0), (1, 0), *([(2, 1)] if num_nodes else [])):
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=cache.device)
        row, start = torch.full_like(zeros[:1], table.pad_row), zeros[:1]
        bounds = torch.tensor([0, num_tokens]).to(cache.device)
        tree = TreeRows(zeros.new_full((1, num_nodes), -1), zeros[:1] + nodes) if nodes else None
        view = PagedView(cache, table, row, start, bounds, num_tokens, tree=tree)
        target.forward(ForwardInput(zeros, zeros, start, view))
        if tree is not None:
            view.move_paths(zeros.new_full((1, num_nodes + 1), -1))
