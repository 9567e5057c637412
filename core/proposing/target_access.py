"""What a proposer may use of the target itself, as far as it declared that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.sdk.errors import Refusal
from specdec.sdk.needs import Needs

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from .target_kv import CachedKV
from .target_layers import CachedLayers, RunLayers

OwnLayers = Callable[[Sequence[int]], RunLayers]
"""Makes some of the target's layers run by themselves. Raises Refusal where they cannot."""


class TargetAccess:
    """Keys and values, and layers. They are used after `use_cache`, and may be taken before."""

    def __init__(self, needs: Needs, own_layers: OwnLayers | None) -> None:
        self._kv = CachedKV(needs.target_kv) if needs.target_kv else None
        self._declared = needs.target_layers.layers if needs.target_layers else ()
        self._own_layers = own_layers
        self._cache: tuple[KVCache, Addressing] | None = None
        self._taken: list[CachedKV | CachedLayers] = [] if self._kv is None else [self._kv]

    def use_cache(self, cache: KVCache, addressing: Addressing) -> None:
        """The target's cache is made."""
        self._cache = cache, addressing
        for each in self._taken:
            each.use_cache(cache, addressing)

    def kv(self) -> CachedKV:
        """See `specdec.sdk.Services.target_kv`."""
        if self._kv is None:
            raise Refusal("target_kv was asked for but not declared", "declare Needs(target_kv=(layer, ...))")
        return self._kv

    def layers(self, layers: Sequence[int]) -> CachedLayers:
        """See `specdec.sdk.Services.target_layers`."""
        undeclared = sorted(set(layers) - set(self._declared))
        if undeclared or not layers or self._own_layers is None:
            reason = f"layers {undeclared or list(layers)} of the target were asked for but not declared"
            raise Refusal(reason, "declare Needs(target_layers=LayerPass(layers=(layer, ...)))")
        taken = CachedLayers(self._own_layers(layers))
        self._taken.append(taken)
        if self._cache is not None:
            taken.use_cache(*self._cache)
        return taken
