"""The attention function that transformers calls in every layer of a target model."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specdec.sdk.errors import Refusal, UnsupportedModelError

from ..cache.kv_cache import LayerShape
from ..kernels.attention_spec import AttentionContext, AttentionSpec
from ..kernels.layers.rotary import by_token

ATTENTION_NAME = "specdec"
CONTEXT = "specdec_context"
"""The keyword argument of attention layers that carries an `AttentionContext`."""
MODULES = "specdec_modules"
"""The one that collects the modules that attend, by layer."""
_INERT_TENSORS = {"position_ids", "cache_position"}


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hkv, N, D]
    value: Tensor,  # [1, Hkv, N, Dv]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    specdec_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # [1, N, Hq, Dv]
    """transformers' attention interface over an `AttentionContext`."""
    if specdec_context is None:
        raise Refusal("its draft network attends, and no draft KV is declared", "declare Needs(draft_kv=DraftKV(...))")
    if not getattr(module, "is_causal", True):  # the library's own attention functions read it like this
        raise _unserved(module, "attends to later tokens as well")
    if attention_mask is not None:  # whatever it says, nothing here would look at it
        raise _unserved(module, "is given a mask of the model's own")
    for name, given in others.items():
        if isinstance(given, Tensor) and name not in _INERT_TENSORS:
            raise _unserved(module, f"takes arguments that the engine does not implement: {name}")
    layer: int = module.layer_idx  # type: ignore[assignment]  # set by every attention layer of the library
    if MODULES in others:
        others[MODULES][layer] = module
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = specdec_context.attend(
        layer,
        query[0].transpose(0, 1) if type(query) is Tensor else by_token(query),
        key[0].transpose(0, 1) if type(key) is Tensor else by_token(key),
        value[0].transpose(0, 1),
        AttentionSpec(scale, sliding_window, softcap),
    )
    return output[None].contiguous(), None  # as the library's own attention functions do: some models view it


def _unserved(module: torch.nn.Module, what: str) -> UnsupportedModelError:
    facts = {"layer": type(module).__name__, "reason": f"its attention {what}"}
    return UnsupportedModelError("SD-E141", "this model's attention is not served", facts)


AttentionInterface.register(ATTENTION_NAME, paged_attention)


def attention_arguments(
    context: AttentionContext, modules: MutableMapping[int, torch.nn.Module] | None = None
) -> dict[str, Any]:
    """The keyword arguments that carry a context through modelling code down to `paged_attention`."""
    return {CONTEXT: context} if modules is None else {CONTEXT: context, MODULES: modules}


@dataclass
class ShapeProbe:
    """Serves one forward pass without a cache and records what each layer would store."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)  # that the layers ask for
    dtypes: set[torch.dtype] = field(default_factory=set)  # that they compute in

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Plain causal attention over the tokens of this pass."""
        if layer in self.layers:
            facts = {"layer": layer, "reason": "it attends more than once in a pass"}
            raise UnsupportedModelError("SD-E141", "this model's attention is not served", facts)
        self.layers[layer] = LayerShape(keys.shape[1], keys.shape[2], values.shape[2])
        self.windows[layer] = spec.window
        self.dtypes |= {query.dtype, keys.dtype, values.dtype}
        query, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, keys, values))
        output = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=spec.scale, enable_gqa=True)
        return output[0].transpose(0, 1)
