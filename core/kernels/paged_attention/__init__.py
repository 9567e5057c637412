"""Attention of ragged queries over keys and values that lie in blocks; everything that varies stays on the device.

Letters: B requests, N query tokens of all, P blocks that a request may have, Hq query heads, Hkv key-value heads,
G = Hq / Hkv, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..attention_spec import Mode


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
