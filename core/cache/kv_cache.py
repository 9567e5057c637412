"""Keys and values of every layer in paged storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from ..device_memory import lazy_zeros
from .state_store import StateStore
from .transfer import upload


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
        storage: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """states: what layers keep of each request besides. None: nothing. storage: each layer's keys and values, which
        another engine allocated: [slots, heads, dim]. None: they are allocated here.
        """
        self.states = states
        self.block_size = block_size
        self.device = device
        self.num_slots = num_blocks * block_size
        self.dtype = dtype
        self.layout = f"{dtype} {list(layers)}"  # two caches of one layout differ in their addresses only
        self.head_sizes = {(layer.key_dim, layer.value_dim) for layer in layers if layer.num_kv_heads}
        storage = storage or [(self._zeros(each, each.key_dim), self._zeros(each, each.value_dim)) for each in layers]
        self.keys, self.values = [keys for keys, _ in storage], [values for _, values in storage]

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Keys of every layer, then values."""
        return (*self.keys, *self.values)

    @cached_property
    def addresses(self) -> Tensor:
        """[L, 2] int64 of keys and values, for kernels."""
        return torch.tensor([[each.data_ptr() for each in layer] for layer in zip(self.keys, self.values, strict=True)])

    @cached_property
    def sized_addresses(self) -> Tensor:
        """[2 L, 2] int64 on the cache's device: of keys, then of values, the address and the bytes per slot."""
        rows = [[each.data_ptr(), each[:1].nbytes] for each in self.stored]
        (table,) = upload([list(chain.from_iterable(rows))], self.device)
        return table.view(-1, 2)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy keys and values of every layer from slots [n] to slots [n]; all are read before one is written."""
        for stored in self.stored:
            stored.index_copy_(0, destinations, stored.index_select(0, sources))

    def _zeros(self, layer: LayerShape, dim: int) -> Tensor:
        return lazy_zeros((self.num_slots, layer.num_kv_heads, dim), self.dtype, self.device)
