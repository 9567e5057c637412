"""Passes over nobody's tokens, before any request waits for what they compile on a device."""

from __future__ import annotations

import torch

from ..cache.block_table import BlockTable
from ..cache.kv_cache import KVCache
from ..cache.paged_view import PagedView
from ..model.forward_input import ForwardInput
from ..model.target import Target


def warm_up_target(target: Target, cache: KVCache, table: BlockTable) -> None:
    """Compute two tokens, then one, of the row that no request has. Each kind of layer compiles its kernels.

    Layers that keep a state compute them as a new text, and keep nothing.
    """
    for num_tokens in (2, 1):
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=cache.device)
        row, start = torch.full_like(zeros[:1], table.pad_row), zeros[:1]
        bounds = torch.tensor([0, num_tokens]).to(cache.device)
        view = PagedView(cache, table, row, start, bounds, num_tokens)
        target.forward(ForwardInput(zeros, zeros, start, view))
