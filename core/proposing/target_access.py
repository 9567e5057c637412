"""What a proposer may use of the target and its requests, as far as it declared that: caches, layers, grammars."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk.errors import Refusal
from specdec.sdk.extensions import Extension, Grammars, TargetKV, TargetLayers
from specdec.sdk.needs import Needs

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from ..kernels.attention_spec import AttentionSpec, StoredAttention
from ..model.attention import attention_arguments
from ..request.grammar import RequestGrammar
from .early_passes import EarlyPasses, early_pass


@dataclass(frozen=True)
class _Reading:
    """An `AttentionContext` that stores nothing: each layer attends to a layer of the target."""

    stored: StoredAttention
    layers: Sequence[int]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend without new keys and values. [N, Hq, D] -> [N, Hq, Dv]."""
        return self.stored.attend_stored(self.layers[layer], query, spec)


class CachedKV:
    """The target's keys and values. There are none until `use_cache`: a cache is sized from the memory that a drafter
    leaves.
    """

    _cache: KVCache
    _addressing: Addressing

    def __init__(self, declared: Collection[int]) -> None:
        """declared: the layers that may be read."""
        self._declared = declared

    def use_cache(self, cache: KVCache, addressing: Addressing) -> None:
        """The target's cache is made."""
        self._cache, self._addressing = cache, addressing

    def read(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Read keys and values of a row. Raises Refusal for a layer that was not declared."""
        self._require_declared([layer])
        slots = self._addressing.slots_of_row(self._cache, row, length)
        return self._cache.keys[layer][slots].clone(), self._cache.values[layer][slots].clone()

    def attention(self, rows: Tensor, lengths: Tensor, layers: Sequence[int]) -> Mapping[str, Any]:
        """Arguments of attention over the target's cache. Raises Refusal for a layer that was not declared."""
        self._require_declared(layers)
        one_each = torch.arange(len(rows) + 1, device=rows.device)
        stored = self._addressing.of_rows(self._cache, rows, lengths - 1, one_each, "causal")
        return attention_arguments(_Reading(stored, layers))

    def _require_declared(self, layers: Collection[int]) -> None:
        if not set(layers) <= set(self._declared):
            declared = ", ".join(map(str, self._declared))
            raise Refusal(f"layers {list(layers)} of the target are read, and {declared} declared", "Needs.target_kv")


RunLayers = Callable[..., Tensor]
"""Layers that run between the target's embedding and its head: see `PartialTarget.__call__`."""


class CachedLayers:
    """Some of the target's layers. There is no cache to run over until `use_cache`."""

    _cache: KVCache
    _addressing: Addressing

    def __init__(self, run: RunLayers) -> None:
        self._run = run

    def use_cache(self, cache: KVCache, addressing: Addressing, passes: EarlyPasses | None) -> None:
        """The target's cache is made. passes: see `TargetAccess.passes`."""
        self._cache, self._addressing, self._passes = cache, addressing, passes

    def logits(
        self,
        token_ids: Tensor,
        rows: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        logits_rows: Tensor,
        adapted: Tensor | None = None,
    ) -> Tensor:
        if self._passes is None:
            self._require_free(rows, starts)
        else:
            starts = self._passes.behind(rows, starts)
        context = self._addressing.of_rows(self._cache, rows, starts, cu_queries, "causal")
        token = torch.arange(len(token_ids), device=token_ids.device)
        owner = torch.searchsorted(cu_queries[1:], token, right=True)
        return self._run(token_ids, starts[owner] + token - cu_queries[owner], logits_rows, context, adapted)

    def _require_free(self, rows: Tensor, starts: Tensor) -> None:
        """Nobody writes over what the target computed. Raises ProposerError SD-E276."""
        computed = self._addressing.num_computed(rows)
        if bool((starts < computed).any()):
            raise early_pass(
                f"starts of at least {computed.tolist()}, `KeptTokens.next_position`", str(starts.tolist())
            )


GrammarOf = Callable[[str], RequestGrammar | None]
OwnLayers = Callable[[Sequence[int], Mapping[str, nn.Module]], RunLayers]
"""Makes some of the target's layers run by themselves, with an adapter (`specdec.sdk.Services.target_layers`).

Raises Refusal where they cannot, CheckpointError SD-E297 where the adapter does not fit.
"""


def not_asked_for(extension: type[Extension], service: str) -> Refusal:
    """The error for a service of an extension that a proposer did not ask for."""
    reason = f"{service} belongs to {extension.id}, which it did not ask for"
    return Refusal(reason, f"needs = Needs(extensions=({extension.__name__}(...), ...))")


def require(needs: Needs, extension: type[Extension], service: str) -> None:
    """Raise Refusal unless the proposer asked for the extension that a service belongs to."""
    if needs.extension(extension) is None:
        raise not_asked_for(extension, service)


class TargetAccess:
    """Keys and values, and layers. They are used after `use_cache`, and may be taken before."""

    def __init__(self, needs: Needs, own_layers: OwnLayers | None, grammar_of: GrammarOf | None = None) -> None:
        self.needs = needs
        self._grammar_of = grammar_of
        read, run = needs.extension(TargetKV), needs.extension(TargetLayers)
        self._kv = CachedKV(read.layers) if read else None
        self._declared = run.layers if run else ()
        self._own_layers = own_layers
        self._cache: tuple[KVCache, Addressing] | None = None
        self._taken: list[CachedLayers] = []
        self.passes: EarlyPasses | None = None
        """Keeps passes over layers off what the target computed. None: the host looks where each begins."""

    def use_cache(self, cache: KVCache, addressing: Addressing) -> None:
        """The target's cache is made."""
        self._cache = cache, addressing
        if self._kv is not None:
            self._kv.use_cache(cache, addressing)
        if self._declared and addressing.table is not None:
            self.passes = EarlyPasses(addressing.table.pad_row, cache.device)
        for each in self._taken:
            each.use_cache(cache, addressing, self.passes)

    def grammar(self, request_id: str, doing: str) -> RequestGrammar | None:
        """The grammar of a request's output. None means that it is free. Raises Refusal if it was not asked for."""
        require(self.needs, Grammars, doing)
        return None if self._grammar_of is None else self._grammar_of(request_id)

    def kv(self) -> CachedKV:
        if self._kv is None:
            raise not_asked_for(TargetKV, "Services.target_kv")
        return self._kv

    def layers(self, layers: Sequence[int], adapter: Mapping[str, nn.Module]) -> CachedLayers:
        undeclared = sorted(set(layers) - set(self._declared))
        if undeclared or not layers or self._own_layers is None:
            raise not_asked_for(TargetLayers, f"layers {undeclared or list(layers)} of Services.target_layers")
        taken = CachedLayers(self._own_layers(layers, adapter))
        self._taken.append(taken)
        if self._cache is not None:
            taken.use_cache(*self._cache, self.passes)
        return taken
