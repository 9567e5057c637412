"""Layers that keep a state, while `generate` runs: as in our engine, and not as in transformers' cache.

A pass computes drafts on a copy of the state, and the next one reads the inputs of those that were accepted again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from specdec.core.host import Backend, Mixers, StateLayout, StateStore, mixers_in
from specdec.sdk.errors import ConfigError

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names by which models take their cache."""


class States:
    """The states that layers keep, of one text at a time."""

    def __init__(self, mixers: Mixers, num_drafts: int, model: Any) -> None:
        """num_drafts: the most of a pass."""
        self.store = StateStore(mixers.layouts, 1, num_drafts, model.device)
        self.mixers = mixers
        self._model = model
        self._as_made = _replaced(model)

    @classmethod
    def of(cls, model: Any, num_drafts: int, backend: Backend) -> States | None:
        """Find the layers that keep a state. None means that no layer does. Raises UnsupportedModelError SD-E144,
        SD-E260.
        """
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        config = model.config.get_text_config(decoder=True)
        mixers = mixers_in(model, config, lambda: model(input_ids=tokens, use_cache=False))
        if mixers is None:
            return None
        mixers.exchange(backend.recurrences())
        return cls(mixers, num_drafts, model)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The modules compute with these states meanwhile. Raises ConfigError SD-E198 if somebody has them already."""
        if _replaced(self._model) != self._as_made:
            facts = {
                "found": "modules whose forward was replaced since",
                "why": "layers of this model keep a state, so one call of `generate` at a time can compute with them",
                "fix": "wait until the other call ends; if there is none, make speculative(model, ...) anew",
            }
            raise ConfigError("SD-E198", "this model does not compute as it did when speculative(...) was made", facts)
        self.mixers.install()
        try:
            yield
        finally:
            self.mixers.remove()

    def hand_over(self, cache: DynamicCache, num_accepted: int) -> None:
        """Give the cache the states after the accepted drafts of the last pass."""
        with torch.no_grad():
            for mixer, kept, inputs in zip(self.mixers.each, self.store.tensors, self.store.inputs, strict=True):
                states = [state[:1].clone() for state in kept]
                if num_accepted:
                    mixer.advance(inputs[:1, :num_accepted], states, mixer.others, decodes=True)
                _put_into(cache.layers[mixer.layer], mixer.layout, states)


def _put_into(layer: Any, layout: StateLayout, states: Sequence[Tensor]) -> None:
    """Make these the states that transformers' cache layer holds."""
    for tensor, state in zip(layout.tensors, states, strict=True):
        update = layer.update_conv_state if tensor.kind == "conv" else layer.update_recurrent_state
        update(state, tensor.index)


def _replaced(model: Any) -> dict[str, Any]:
    """Forwards that replace those of a module's class, by the module's name."""
    return {name: vars(module)["forward"] for name, module in model.named_modules() if "forward" in vars(module)}


def new_cache(config: Any) -> DynamicCache:
    """transformers' own for a model whose layers keep a state, but that layers with a window keep all tokens: what
    leaves a window for a rejected draft is lost.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_without_window(layer) for layer in cache.layers]
    return cache


def _without_window(layer: Any) -> Any:
    if not isinstance(layer, CacheLayerMixin):
        return layer  # a state, or nothing
    stateful = isinstance(layer, LinearAttentionCacheLayerMixin)
    return LinearAttentionAndFullAttentionLayer(layer.number_of_states) if stateful else DynamicLayer()


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model. None: there is none."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def is_filled(cache: Any) -> bool:
    """Whether a cache holds anything of a text."""
    stateful = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    attending = any(layer.get_seq_length() > 0 for layer in cache.layers if isinstance(layer, CacheLayerMixin))
    return attending or any(any(layer.has_previous_state.values()) for layer in stateful)
