"""Attention of ragged queries over keys and values whose slots the host knows: the CPU's way, by views of them.

Letters: B requests, N query tokens of all, n of one, T its tokens with KV, Hq query heads, Hkv key-value heads,
G = Hq / Hkv, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention_spec import AttentionSpec, Mode


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
        num_keys = torch.tensor([self.num_keys], device=self.device)
        return _visible(num_keys, self.num_queries, self.num_keys, window, self.mode)[0]

    @property
    def is_plain_causal(self) -> bool:
        """Every key belongs to a query of this batch: a prompt's first chunk."""
        return self.num_queries == self.num_keys > 1 and self.mode != "full_block"


def _visible(num_keys: Tensor, num_queries: int, width: int, window: int | None, mode: Mode) -> Tensor:
    """[B, n, width] bool, true where a query sees a key, for requests with `num_keys` [B] and equally many queries."""
    keys = torch.arange(width, device=num_keys.device)
    first = (num_keys - num_queries)[:, None, None]  # position of a request's first query
    queries = first + torch.arange(num_queries, device=num_keys.device)[:, None]
    visible = keys <= (num_keys[:, None, None] - 1).expand_as(queries) if mode == "full_block" else keys <= queries
    if window is None:
        return visible
    return visible & (keys > queries - window if mode == "causal" else keys >= first - window)


PADDING_KEYS = 64
"""Keys that may be read in vain per request of a group: reading them costs less than a call of its own."""


@dataclass(frozen=True)
class SpanGroup:
    """Requests with equally many queries whose keys start at equally spaced slots: one call attends for all of them.

    What a shorter request reads beyond its own keys is hidden by the mask; it must lie within the cache.
    """

    spans: tuple[Span, ...]
    spacing: int  # slots from a request's first key to the next one's

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def stop(self) -> int:
        return self.spans[-1].stop

    @cached_property
    def num_keys(self) -> int:
        """T of the longest."""
        return max(span.num_keys for span in self.spans)

    @cached_property
    def is_padded(self) -> bool:
        """Whether a request reads keys that are not its own."""
        return any(span.num_keys < self.num_keys for span in self.spans)

    @cached_property
    def _masks(self) -> dict[tuple[int | None, int, torch.dtype], Tensor]:
        return {}

    def rows(self, stored: Tensor) -> Tensor:
        """[slots, Hkv, D] -> [B, Hkv, T, D], a view."""
        slot, head, element = stored.stride()
        size = (len(self.spans), stored.shape[1], self.num_keys, stored.shape[2])
        first = stored.storage_offset() + self._first_slot * slot
        return stored.as_strided(size, (self.spacing * slot, head, slot, element), first)

    @cached_property
    def _first_slot(self) -> int:
        return _first_slot(self.spans[0])

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, group*n, T], 0 where a query sees a key, else -inf; None if every query sees every key.

        Queries in the order of `Span.mask`. Made once, shared by layers.
        """
        example = self.spans[0]
        one_row = example.num_queries == 1 or example.mode == "full_block"
        if window is None and one_row and not self.is_padded:
            return None
        if (window, group, dtype) not in self._masks:
            num_keys = torch.tensor([span.num_keys for span in self.spans], device=example.device)
            visible = _visible(num_keys, example.num_queries, self.num_keys, window, example.mode)
            mask = torch.zeros(visible.shape, dtype=dtype, device=example.device)
            mask = mask.masked_fill_(~visible, -math.inf).repeat(1, group, 1)[:, None]
            self._masks[window, group, dtype] = mask
        return self._masks[window, group, dtype]


def group_spans(spans: Sequence[Span], num_slots: int) -> list[Span | SpanGroup]:
    """Consecutive spans that one call can serve become a group; the others stay as they are."""
    parts: list[Span | SpanGroup] = []
    for span in spans:
        last = parts[-1] if parts else None
        if not isinstance(span.slots, slice) or span.is_plain_causal:
            parts.append(span)
        elif isinstance(last, SpanGroup) and _may_join(last, span, num_slots):
            parts[-1] = SpanGroup((*last.spans, span), _first_slot(span) - _first_slot(last.spans[-1]))
        else:
            parts.append(SpanGroup((span,), 0))
    return parts


def _first_slot(span: Span) -> int:
    assert isinstance(span.slots, slice), "a group's keys are adjacent"
    return int(span.slots.start)


def _may_join(group: SpanGroup, span: Span, num_slots: int) -> bool:
    last, first = group.spans[-1], _first_slot(span)
    if (span.num_queries, span.mode) != (last.num_queries, last.mode):
        return False
    spacing = first - _first_slot(last)
    if spacing < 1 or (len(group.spans) > 1 and spacing != group.spacing):
        return False
    longest, count = max(group.num_keys, span.num_keys), len(group.spans) + 1
    padding = longest * count - span.num_keys - sum(each.num_keys for each in group.spans)
    return padding <= PADDING_KEYS * count and first + longest <= num_slots


def attend_by_span(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [slots, Hkv, D]
    values: Tensor,  # [slots, Hkv, Dv]
    parts: Sequence[Span | SpanGroup],
    spec: AttentionSpec,
) -> Tensor:  # [N, Hq, Dv]
    """PyTorch's fused attention part by part; each key and value is read once for its group of heads."""
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    grouped = query.view(len(query), num_kv_heads, num_heads // num_kv_heads, -1)  # [N, Hkv, G, D]
    if len(parts) == 1:
        return _attend_part(grouped, keys, values, parts[0], spec).flatten(1, 2)
    outputs = [_attend_part(grouped[part.start : part.stop], keys, values, part, spec) for part in parts]
    return torch.cat(outputs).flatten(1, 2)


def _attend_part(query: Tensor, keys: Tensor, values: Tensor, part: Span | SpanGroup, spec: AttentionSpec) -> Tensor:
    """See `_attend_group` and `_attend_one`."""
    if isinstance(part, SpanGroup):
        return _attend_group(query, keys, values, part, spec)
    return _attend_one(query, keys, values, part, spec)


def _attend_group(
    query: Tensor,  # [B*n, Hkv, G, D]
    keys: Tensor,  # [slots, Hkv, D]
    values: Tensor,  # [slots, Hkv, Dv]
    part: SpanGroup,
    spec: AttentionSpec,
) -> Tensor:  # [B*n, Hkv, G, Dv]
    group, num_requests, num_queries = query.shape[2], len(part.spans), part.spans[0].num_queries
    by_request = query
    if num_queries > 1:  # heads that share a key are queries of one head: [B, Hkv, G*n, D]
        by_request = query.view(num_requests, num_queries, *query.shape[1:]).permute(0, 2, 3, 1, 4).flatten(2, 3)
    window = None if spec.window is None or spec.window >= part.num_keys else spec.window
    mask = part.mask(window, group, query.dtype)
    output = _softmax_attention(by_request, part.rows(keys), part.rows(values), mask, spec)
    if part.is_padded and not math.isfinite(output.sum().item()):
        # A hidden key counts 0 times its value, which is not 0 for what an overflow of another request left behind.
        single_queries = query.view(num_requests, num_queries, *query.shape[1:])
        singles = [_attend_one(q, keys, values, s, spec) for q, s in zip(single_queries, part.spans, strict=True)]
        return torch.cat(singles)
    if num_queries > 1:
        output = output.reshape(*output.shape[:2], group, num_queries, -1).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return output


def _attend_one(
    query: Tensor,  # [n, Hkv, G, D]
    keys: Tensor,  # [slots, Hkv, D]
    values: Tensor,  # [slots, Hkv, Dv]
    span: Span,
    spec: AttentionSpec,
) -> Tensor:  # [n, Hkv, G, Dv]
    num_queries, num_kv_heads, group, _ = query.shape
    keys, values = (stored[span.slots].transpose(0, 1)[None] for stored in (keys, values))  # [1, Hkv, T, D]
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
    output = _softmax_attention(query, keys, values, span.mask(window, group), spec)
    if num_queries > 1:
        output = output.reshape(num_kv_heads, group, num_queries, -1).permute(2, 0, 1, 3)
    return output


def _softmax_attention(
    query: Tensor,  # [B, Hkv, G*n, D]
    keys: Tensor,  # [B, Hkv, T, D]
    values: Tensor,  # [B, Hkv, T, Dv]
    mask: Tensor | None,  # bool or additive, broadcast to [B, Hkv, G*n, T]
    spec: AttentionSpec,
) -> Tensor:  # [B, Hkv, G*n, Dv]
    if spec.softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    scores = spec.softcap * torch.tanh(query @ keys.transpose(-1, -2) * (spec.scale / spec.softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ values


def keep_spans(spans: Sequence[Span], num_slots: int) -> Sequence[Span | SpanGroup]:
    """Every request on its own: a group looks at its output, for which a host would wait on its device."""
    return spans


DIVIDE: Mapping[str, Callable[[Sequence[Span], int], Sequence[Span | SpanGroup]]] = {
    "cpu": group_spans,
    "cuda": keep_spans,
}
"""How a batch of so many slots is divided into calls, for each device type."""
