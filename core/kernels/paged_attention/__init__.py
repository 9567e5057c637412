"""Attention of ragged queries over keys and values that lie in blocks; everything that varies stays on the device.

Letters: B requests, N query tokens of all, P blocks that a request may have, Hq query heads, Hkv key-value heads,
G = Hq / Hkv, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention_spec import Mode


@dataclass(frozen=True)
class TreeMask:
    """The last positions of each request are nodes of a tree: each sees what lies before the tree, and its own path.

    A node stands at the position of its depth for windows and chunks, and its slot follows its number.
    """

    num_nodes: Tensor  # [B] int32; 0: all positions of the request follow each other
    ancestors: Tensor  # [B, W] int64; see `kernels.tree_masks`
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
