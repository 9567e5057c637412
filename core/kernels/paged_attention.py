"""Attention of ragged queries over keys and values that lie in blocks; everything that varies stays on the device.

This is the plain form, request by request in fp32. Letters: B requests, N query tokens of all, P blocks that a request
may have, Hq query heads, Hkv key-value heads, G = Hq / Hkv, D head size of queries and keys, Dv of
values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_spec import AttentionSpec, Mode


@dataclass(frozen=True)
class TreeMask:
    """The last positions of each request are nodes of a tree: each sees what lies before the tree, and its own path.

    A node stands at the position of its depth for windows and chunks, and its slot follows its number.
    """

    num_nodes: Tensor  # [B] int32; 0: all positions of the request follow each other
    ancestors: Tensor  # [B, W] int64; see `trees.tree_masks`
    depths: Tensor  # [B, W] int32


@dataclass(frozen=True)
class Pages:
    """Where the keys of a batch's requests lie, and which queries are whose.

    Request b owns the queries `cu_queries[b] : cu_queries[b+1]`, none or more; they are the last of its `num_keys[b]`
    positions. Queries behind the last request's belong to nobody: what they give is undefined.
    """

    block_table: Tensor  # [B, P] int32; entries behind a request's keys are never read
    num_keys: Tensor  # [B] int32
    cu_queries: Tensor  # [B+1] int32
    block_size: int
    max_queries: int  # no request has more; a bound that the host knows without asking
    max_keys: int  # likewise; the same for an engine's whole life, so that it changes no rounding
    mode: Mode = "causal"
    tree: TreeMask | None = None  # with "causal" alone


def attend_pages(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [slots, Hkv, D]
    values: Tensor,  # [slots, Hkv, Dv]
    pages: Pages,
    spec: AttentionSpec,
) -> Tensor:  # [N, Hq, Dv]
    """Softmax attention of every query over the keys of its request that it sees."""
    output = query.new_zeros(*query.shape[:2], values.shape[2])
    bounds = pages.cu_queries.tolist()
    for b, num_keys in enumerate(pages.num_keys.tolist()):
        own = slice(bounds[b], bounds[b + 1])
        position = torch.arange(num_keys, device=query.device)
        block = pages.block_table[b, position // pages.block_size].long()
        slots = block * pages.block_size + position % pages.block_size
        if pages.tree is None:
            seen = _seen(num_keys, own.stop - own.start, spec, pages.mode).to(query.device)
        else:
            seen = _seen_in_tree(num_keys, own.stop - own.start, spec, pages.tree, b).to(query.device)
        output[own] = _attend(query[own], keys[slots], values[slots], seen, spec)
    return output


def _seen(num_keys: int, num_queries: int, spec: AttentionSpec, mode: Mode) -> Tensor:
    """[n, T] bool, true where a query sees a key."""
    key = torch.arange(num_keys)
    first = num_keys - num_queries
    query = first + torch.arange(num_queries)[:, None]
    seen = (key <= query) if mode != "full_block" else torch.ones(num_queries, num_keys, dtype=torch.bool)
    if spec.window is not None:
        seen = seen & (key > query - spec.window if mode == "causal" else key >= first - spec.window)
    return seen if spec.chunk is None else seen & (key >= query // spec.chunk * spec.chunk)


def _seen_in_tree(num_keys: int, num_queries: int, spec: AttentionSpec, tree: TreeMask, b: int) -> Tensor:
    """Which keys queries see, as `_seen` says, where the last positions of request b are nodes."""
    count = int(tree.num_nodes[b])
    first = num_keys - count  # slot of node 0
    node = torch.arange(count)
    position = torch.cat([torch.arange(first), first - 1 + tree.depths[b, :count].cpu()])
    seen = torch.arange(num_keys) <= torch.arange(num_keys)[:, None]
    seen[first:, first:] = tree.ancestors[b, :count].cpu()[:, None] >> node & 1 == 1
    query, seen = position[num_keys - num_queries :, None], seen[num_keys - num_queries :]
    if spec.window is not None:
        seen = seen & (position > query - spec.window)
    return seen if spec.chunk is None else seen & (position >= query // spec.chunk * spec.chunk)


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, spec: AttentionSpec) -> Tensor:
    """[n, Hq, D], [T, Hkv, D], [T, Hkv, Dv] -> [n, Hq, Dv]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("nhd,thd->hnt", query.float(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks.float()[:, None, None].expand(-1, len(query), 1)], -1)
    weights = scores.softmax(-1)[..., : len(values)]
    return torch.einsum("hnt,thd->nhd", weights, values).to(query.dtype)
