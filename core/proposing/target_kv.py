"""The target's own cache, for a proposer that reads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.errors import Refusal

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from ..kernels.attention_spec import AttentionSpec, StoredAttention
from ..model.attention import attention_arguments


@dataclass(frozen=True)
class _Reading:
    """An `AttentionContext` that stores nothing: each layer attends to a layer of the target."""

    stored: StoredAttention
    layers: Sequence[int]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """See `TargetKV.attention`. [N, Hq, D] -> [N, Hq, Dv]; new keys and values are not looked at."""
        return self.stored.attend_stored(self.layers[layer], query, spec)


class CachedKV:
    """See `TargetKV`. There is none until `use_cache`: a cache is sized from the memory that a drafter leaves."""

    _cache: KVCache
    _addressing: Addressing

    def __init__(self, declared: Collection[int]) -> None:
        """declared: the layers that may be read."""
        self._declared = declared

    def use_cache(self, cache: KVCache, addressing: Addressing) -> None:
        """The target's cache is made."""
        self._cache, self._addressing = cache, addressing

    def read(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """See `TargetKV`. Raises Refusal for a layer that was not declared."""
        self._require_declared([layer])
        slots = self._addressing.slots_of_row(self._cache, row, length)
        return self._cache.keys[layer][slots].clone(), self._cache.values[layer][slots].clone()

    def attention(self, rows: Tensor, lengths: Tensor, layers: Sequence[int]) -> Mapping[str, Any]:
        """See `TargetKV`. Raises Refusal for a layer that was not declared."""
        self._require_declared(layers)
        one_each = torch.arange(len(rows) + 1, device=rows.device)
        stored = self._addressing.of_rows(self._cache, rows, lengths - 1, one_each, "causal")
        return attention_arguments(_Reading(stored, layers))

    def _require_declared(self, layers: Collection[int]) -> None:
        if not set(layers) <= set(self._declared):
            declared = ", ".join(map(str, self._declared))
            raise Refusal(f"layers {list(layers)} of the target are read, and {declared} declared", "Needs.target_kv")
