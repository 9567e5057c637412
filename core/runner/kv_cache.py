"""Keys and values of every layer in paged storage, and what a batch of requests sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.attention import ATTEND, AttentionSpec, Mode, Span


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class KVCache:
    """Storage [slots, heads, dim] per layer; slot = block * block_size + offset. Untouched pages cost a CPU nothing."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.device = device
        num_slots = num_blocks * block_size
        self.keys = [
            torch.empty(num_slots, layer.num_kv_heads, layer.key_dim, dtype=dtype, device=device) for layer in layers
        ]
        self.values = [
            torch.empty(num_slots, layer.num_kv_heads, layer.value_dim, dtype=dtype, device=device) for layer in layers
        ]

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of positions start .. stop-1 of a request with these blocks."""
        size = self.block_size
        return [
            blocks[position // size] * size + position % size for position in range(start, stop)
        ]  # fmt: skip

    def span(self, blocks: Sequence[int], start: int, num_queries: int, num_keys: int, mode: Mode = "causal") -> Span:
        """A request's share of a batch whose first query is the batch's `start`-th."""
        size = self.block_size
        used = -(-num_keys // size)
        if blocks[:used] == list(range(blocks[0], blocks[0] + used)):
            first = blocks[0] * size
            return Span(start, num_queries, num_keys, slice(first, first + num_keys), self.device, mode)
        slots = torch.tensor(self.slots(blocks, 0, num_keys), device=self.device)
        return Span(start, num_queries, num_keys, slots, self.device, mode)


@dataclass(frozen=True)
class CacheView:
    """The cache as one batch sees it: where new keys and values go, and which keys each query sees."""

    cache: KVCache
    slots: Tensor  # [N] int64
    spans: tuple[Span, ...]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Store this layer's new keys and values, then attend: [N, Hq, D], [N, Hkv, D], [N, Hkv, Dv] -> [N, Hq, Dv]."""
        stored_keys, stored_values = self.cache.keys[layer], self.cache.values[layer]
        stored_keys.index_copy_(0, self.slots, keys)
        stored_values.index_copy_(0, self.slots, values)
        return ATTEND[query.device.type](query, stored_keys, stored_values, self.spans, spec)
