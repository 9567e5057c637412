"""Attention of ragged queries over stored keys and values, in PyTorch: over slots that the host knows, or over blocks.

Letters: B requests, P blocks that one may have, N query tokens of all, n of one, T its tokens with KV, Hq query heads,
Hkv key-value heads, G = Hq / Hkv, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention_spec import AttentionSpec, Mode

_MODES: tuple[Mode, ...] = ("causal", "causal_block", "full_block")


@dataclass(frozen=True)
class Span:
    """A request's share of a batch: its queries are the last `num_queries` of its `num_keys` positions."""

    start: int  # its first query among the batch's
    num_queries: int
    num_keys: int
    slots: slice | Tensor  # where its keys lie in the cache: a view if its blocks are adjacent, else [T] indices
    device: torch.device
    mode: Mode = "causal"
    _masks: dict[tuple[int | None, int | None, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def stop(self) -> int:
        return self.start + self.num_queries

    def mask(self, spec: AttentionSpec, group: int) -> Tensor | None:
        """[group*n, T] bool, true where a query sees a key; None if every query sees every key.

        The queries of the `group` heads that share a key follow each other head by head. Made once, shared by layers.
        """
        window, chunk = self._limits(spec)
        if window is None and chunk is None and (self.num_queries == 1 or self.mode == "full_block"):
            return None
        if (window, chunk, group) not in self._masks:
            self._masks[window, chunk, group] = self._visible(window, chunk).repeat(group, 1)
        return self._masks[window, chunk, group]

    def _limits(self, spec: AttentionSpec) -> tuple[int | None, int | None]:
        """Window and chunk, None where they are longer than all keys."""
        window, chunk = spec.window, spec.chunk
        return (
            None if window and window >= self.num_keys else window,
            None if chunk and chunk >= self.num_keys else chunk,
        )

    def _visible(self, window: int | None, chunk: int | None) -> Tensor:
        """[n, T] bool, true where a query sees a key."""
        keys = torch.arange(self.num_keys, device=self.device)
        first = self.num_keys - self.num_queries  # position of the first query
        queries = torch.arange(first, self.num_keys, device=self.device)[:, None]
        visible = (keys < self.num_keys).expand(len(queries), -1) if self.mode == "full_block" else keys <= queries
        if window is not None:
            visible = visible & (keys > queries - window if self.mode == "causal" else keys >= first - window)
        return visible if chunk is None else visible & (keys >= queries // chunk * chunk)

    @property
    def rows(self) -> Sequence[Span]:
        """A span for each query behind earlier keys: PyTorch rounds several at once otherwise than one, and drafts
        must not change what the token before them gives."""
        if self.num_queries == 1 or self.num_queries == self.num_keys or self.mode != "causal":
            return (self,)
        return [self._row(index) for index in range(self.num_queries)]

    def _row(self, index: int) -> Span:
        num_keys = self.num_keys - self.num_queries + index + 1
        own = self.slots
        slots = slice(own.start, own.start + num_keys) if isinstance(own, slice) else own[:num_keys]
        return Span(self.start + index, 1, num_keys, slots, self.device)

    def is_plain_causal(self, spec: AttentionSpec) -> bool:
        """Every key belongs to a query of this batch, a prompt's first chunk, and each query sees all before it."""
        if spec.softcap is not None or spec.sinks is not None or self._limits(spec) != (None, None):
            return False
        return self.num_queries == self.num_keys > 1 and self.mode != "full_block"


@dataclass(frozen=True)
class SpanBatch:
    """Which keys each query of a batch sees; its own keys and values are the last of them."""

    spans: Sequence[Span]

    @cached_property
    def slots(self) -> Tensor | slice:
        """[N] int64, where new keys and values go; a slice where they are consecutive, which is faster."""
        slots: list[int] = []
        for span in self.spans:
            own = span.slots
            if isinstance(own, slice):
                slots += range(own.stop - span.num_queries, own.stop)
            else:
                slots += own[-span.num_queries :].tolist()
        first, stop = slots[0], slots[0] + len(slots)
        if slots == list(range(first, stop)):
            return slice(first, stop)
        return torch.tensor(slots, device=self.spans[0].device)

    @cached_property
    def rows(self) -> Sequence[Span]:
        """The spans that PyTorch serves one after the other. Made once, shared by layers."""
        return [row for span in self.spans for row in span.rows]

    @cached_property
    def table(self) -> Tensor:
        """[B * 6] int64: first query, queries, keys, first slot, address of the slots or 0, number of the mode."""
        rows: list[int] = []
        for span in self.spans:
            first, slots = (span.slots.start, 0) if isinstance(span.slots, slice) else (0, span.slots.data_ptr())
            rows += (span.start, span.num_queries, span.num_keys, first, slots, _MODES.index(span.mode))
        return torch.tensor(rows)


def attend_in_torch(
    query: Tensor,  # [N, Hq, D]
    keys: Tensor,  # [N, Hkv, D], new ones
    values: Tensor,  # [N, Hkv, Dv]
    stored_keys: Tensor,  # [slots, Hkv, D]
    stored_values: Tensor,  # [slots, Hkv, Dv]
    batch: SpanBatch,
    spec: AttentionSpec,
) -> Tensor:  # [N, Hq, Dv]
    """Stores a layer's new keys and values, then attends."""
    if isinstance(batch.slots, slice):
        stored_keys[batch.slots].copy_(keys)
        stored_values[batch.slots].copy_(values)
    else:
        stored_keys.index_copy_(0, batch.slots, keys)
        stored_values.index_copy_(0, batch.slots, values)
    return attend_by_span(query, stored_keys, stored_values, batch.rows, spec)


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
    outputs = [_attend_one(grouped[span.start : span.stop], keys, values, span, spec) for span in spans]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1, 2)


def _attend_one(
    query: Tensor,  # [n, Hkv, G, D]
    keys: Tensor,  # [slots, Hkv, D]
    values: Tensor,  # [slots, Hkv, Dv]
    span: Span,
    spec: AttentionSpec,
) -> Tensor:  # [n, Hkv, G, Dv]
    num_queries, num_kv_heads, group, _ = query.shape
    keys, values = (stored[span.slots].transpose(0, 1)[None] for stored in (keys, values))  # [1, Hkv, T, D]
    if span.is_plain_causal(spec):
        by_head = query.flatten(1, 2).transpose(0, 1)[None]
        output = scaled_dot_product_attention(
            by_head, keys, values, is_causal=True, scale=spec.scale, enable_gqa=group > 1
        )
        return output[0].transpose(0, 1).reshape(num_queries, num_kv_heads, group, -1)
    # Heads that share a key are queries of one head: [1, Hkv, G*n, D] against [1, Hkv, T, D].
    if num_queries > 1:
        query = query.permute(1, 2, 0, 3).flatten(1, 2)[None]
    output = _softmax_attention(query, keys, values, span.mask(spec, group), spec)
    if num_queries > 1:
        output = output.reshape(num_kv_heads, group, num_queries, -1).permute(2, 0, 1, 3)
    return output


def _softmax_attention(
    query: Tensor,  # [1, Hkv, G*n, D]
    keys: Tensor,  # [1, Hkv, T, D]
    values: Tensor,  # [1, Hkv, T, Dv]
    mask: Tensor | None,  # [G*n, T] bool
    spec: AttentionSpec,
) -> Tensor:  # [1, Hkv, G*n, Dv]
    if spec.softcap is None and spec.sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    scores = query @ keys.transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if spec.sinks is not None:  # one more key, which has no value
        scores = torch.cat([scores, _by_row(spec.sinks, scores).to(scores)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return weights[..., : values.shape[-2]] @ values


def _by_row(sinks: Tensor, scores: Tensor) -> Tensor:
    """[Hq] -> [1, Hkv, G*n, 1], as the scores [1, Hkv, G*n, T] of heads that share a key are laid out."""
    num_kv_heads, num_rows = scores.shape[-3:-1]
    grouped = sinks.view(num_kv_heads, -1)
    return grouped.repeat_interleave(num_rows // grouped.shape[1], dim=1)[None, :, :, None]


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
    spans = list(_spans(pages, query.device))
    if spans:
        output[: spans[-1].stop] = attend_by_span(query, keys, values, spans, spec)
    return output


def _spans(pages: Pages, device: torch.device) -> Iterator[Span]:
    """What each request's queries see; in a tree each query has a span of its own, whose keys are those of its path."""
    bounds = pages.cu_queries.tolist()
    for b, num_keys in enumerate(pages.num_keys.tolist()):
        start, count = bounds[b], bounds[b + 1] - bounds[b]
        position = torch.arange(num_keys, device=device)
        slots = pages.block_table[b, position // pages.block_size].long() * pages.block_size
        slots += position % pages.block_size
        root = num_keys - (0 if pages.tree is None else int(pages.tree.num_nodes[b]))  # position of node 0
        if pages.tree is not None and root < num_keys:
            for query in range(count):
                at = num_keys - count + query
                seen = position <= at
                if at >= root:
                    seen[root:] = pages.tree.ancestors[b, at - root] >> (position[root:] - root) & 1 == 1
                yield Span(start + query, 1, int(seen.sum()), slots[seen], device)
        elif count:
            yield Span(start, count, num_keys, slots, device, pages.mode)
