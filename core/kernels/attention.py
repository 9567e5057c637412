"""Attention of ragged queries over paged keys and values, one implementation per kind of device.

Letters: N query tokens of all requests, n of one, T its tokens with KV, Hq query heads, Hkv key-value heads,
G = Hq / Hkv, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of attention besides its tensors."""

    scale: float
    window: int | None = None  # a query sees this many positions, itself included; None: all before it
    softcap: float | None = None  # scores are softcap * tanh(scores / softcap)


Mode = Literal["causal", "causal_block", "full_block"]
"""Which keys a query sees: all before it and itself; the same, with windows counted from the span's first query (a
block of drafts); or every key, with windows counted so."""


@dataclass(frozen=True)
class Span:
    """One request's share of a batch: its queries are the last `num_queries` of its `num_keys` positions."""

    start: int  # its first query among the batch's
    num_queries: int
    num_keys: int
    slots: slice | Tensor  # where its keys lie in the cache: a view if its blocks are adjacent, else [T] indices
    device: torch.device
    mode: Mode = "causal"
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def stop(self) -> int:
        return self.start + self.num_queries

    def mask(self, window: int | None, group: int) -> Tensor | None:
        """[group*n, T] bool, true where a query sees a key; None if every query sees every key.

        The queries of the `group` heads that share a key follow each other head by head. Made once, shared by layers.
        """
        if window is None and (self.num_queries == 1 or self.mode == "full_block"):
            return None
        if (window, group) not in self._masks:
            self._masks[window, group] = self._visible(window).repeat(group, 1)
        return self._masks[window, group]

    def _visible(self, window: int | None) -> Tensor:
        keys = torch.arange(self.num_keys, device=self.device)
        first = self.num_keys - self.num_queries
        queries = keys[first:, None]
        visible = (keys >= 0).expand(self.num_queries, -1) if self.mode == "full_block" else keys <= queries
        if window is None:
            return visible
        return visible & (keys > queries - window if self.mode == "causal" else keys >= first - window)

    @property
    def is_plain_causal(self) -> bool:
        """Every key belongs to a query of this batch: a prompt's first chunk."""
        return self.num_queries == self.num_keys > 1 and self.mode != "full_block"


def attend_by_span(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [slots, Hkv, D]
    values: Tensor,  # [slots, Hkv, Dv]
    spans: Sequence[Span],
    spec: AttentionSpec,
) -> Tensor:  # [N, Hq, Dv]
    """PyTorch's fused attention request by request; each key and value is read once for its group of heads."""
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    grouped = query.view(len(query), num_kv_heads, num_heads // num_kv_heads, -1)  # [N, Hkv, G, D]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, Hkv, slots, D]
    outputs = [
        _attend_one(grouped[span.start : span.stop], keys[:, :, span.slots], values[:, :, span.slots], span, spec)
        for span in spans
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.flatten(1, 2)


def _attend_one(
    query: Tensor,  # [n, Hkv, G, D]
    keys: Tensor,  # [1, Hkv, T, D]
    values: Tensor,  # [1, Hkv, T, Dv]
    span: Span,
    spec: AttentionSpec,
) -> Tensor:  # [n, Hkv, G, Dv]
    num_queries, num_kv_heads, group, _ = query.shape
    window = None if spec.window is None or spec.window >= span.num_keys else spec.window
    if spec.softcap is None and window is None and span.is_plain_causal:
        by_head = query.flatten(1, 2).transpose(0, 1)[None]
        output = scaled_dot_product_attention(
            by_head, keys, values, is_causal=True, scale=spec.scale, enable_gqa=group > 1
        )
        return output[0].transpose(0, 1).reshape(num_queries, num_kv_heads, group, -1)
    # Heads that share a key are queries of one head: [1, Hkv, G*n, D] against [1, Hkv, T, D].
    if num_queries > 1:
        query = query.permute(1, 2, 0, 3).flatten(1, 2)[None]
    mask = span.mask(window, group)
    if spec.softcap is None:
        output = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    else:
        output = _soft_capped(query, keys, values, mask, spec.scale, spec.softcap)
    if num_queries > 1:
        output = output.reshape(num_kv_heads, group, num_queries, -1).permute(2, 0, 1, 3)
    return output


def _soft_capped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    scores = cap * torch.tanh(query @ keys.transpose(-1, -2) * (scale / cap))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ values


Attend = Callable[[Tensor, Tensor, Tensor, Sequence[Span], AttentionSpec], Tensor]

ATTEND: Mapping[str, Attend] = {"cpu": attend_by_span, "cuda": attend_by_span}
"""The implementation for each device type."""
