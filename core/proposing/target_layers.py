"""Layers of the target that a proposer runs over the target's own cache."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specdec.sdk.errors import ProposerError

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from ..kernels.attention_spec import AttentionContext


class RunLayers(Protocol):
    """Layers that run between the target's embedding and its head."""

    def __call__(self, tokens: Tensor, positions: Tensor, logits_rows: Tensor, context: AttentionContext) -> Tensor:
        """Logits [R, V] of the rows `logits_rows` [R] of tokens [M] at positions [M]."""
        ...


class CachedLayers:
    """See `specdec.sdk.TargetLayers`. There is no cache to run over until `use_cache`."""

    _cache: KVCache
    _addressing: Addressing

    def __init__(self, run: RunLayers) -> None:
        self._run = run

    def use_cache(self, cache: KVCache, addressing: Addressing) -> None:
        """The target's cache is made."""
        self._cache, self._addressing = cache, addressing

    def logits(
        self, token_ids: Tensor, rows: Tensor, starts: Tensor, cu_queries: Tensor, logits_rows: Tensor
    ) -> Tensor:
        """See `specdec.sdk.TargetLayers`."""
        self._require_free(rows, starts)
        context = self._addressing.of_rows(self._cache, rows, starts, cu_queries, "causal")
        token = torch.arange(len(token_ids), device=token_ids.device)
        owner = torch.searchsorted(cu_queries[1:], token, right=True)
        return self._run(token_ids, starts[owner] + token - cu_queries[owner], logits_rows, context)

    def _require_free(self, rows: Tensor, starts: Tensor) -> None:
        """Nobody writes over what the target computed, as far as the host can look without waiting."""
        computed = self._addressing.num_computed(rows)
        if computed is not None and bool((starts < computed).any()):
            facts = {
                "expected": f"starts of at least {computed.tolist()}, `KeptRows.next_position`",
                "found": str(starts.tolist()),
                "why": "the keys and values before are the target's own, and its text depends on them",
            }
            raise ProposerError("SD-E276", "a draft pass would write over what the target computed", facts)
