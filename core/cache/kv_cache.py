"""Keys and values of every layer in paged storage, and what a batch of requests sees of them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.attention_spec import AttentionSpec, Mode
from ..kernels.cpu.attention import Span, SpanBatch
from ..kernels.cpu.backend import Backend

if TYPE_CHECKING:
    from .state_store import StateStore


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores per token; nothing where it does not attend."""

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
        states: StateStore | None = None,
    ) -> None:
        """states: what layers keep of each request besides. None: nothing."""
        self.states = states
        self.block_size = block_size
        self.device = device
        self.num_slots = num_blocks * block_size
        self.dtype = dtype
        self.layout = (
            f"{dtype} {list(layers)}"  # what two caches must have in common for code that knows addresses only
        )
        self.head_sizes = {(layer.key_dim, layer.value_dim) for layer in layers if layer.num_kv_heads}
        self.keys = [self._storage(layer.num_kv_heads, layer.key_dim, dtype) for layer in layers]
        self.values = [self._storage(layer.num_kv_heads, layer.value_dim, dtype) for layer in layers]

    @cached_property
    def addresses(self) -> Tensor:
        """[L, 2] int64 of keys and values, for kernels."""
        return torch.tensor([[each.data_ptr() for each in layer] for layer in zip(self.keys, self.values, strict=True)])

    def _storage(self, num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        shape = (self.num_slots, num_heads, dim)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return lazy_zeros(shape, dtype)

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


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU whose pages are committed when they are first touched."""
    if not prod(shape):
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


@dataclass(frozen=True)
class CacheView:
    """The cache as a batch sees it whose slots the host knows."""

    cache: KVCache
    batch: SpanBatch
    backend: Backend

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Store this layer's new keys and values, then attend: [N, Hq, D], [N, Hkv, D], [N, Hkv, Dv] -> [N, Hq, Dv]."""
        stored_keys, stored_values = self.cache.keys[layer], self.cache.values[layer]
        return self.backend.attend(query, keys, values, stored_keys, stored_values, self.batch, spec)
