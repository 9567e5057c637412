"""The attention function that transformers calls in every layer of a target model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specdec.sdk.errors import Refusal, UnsupportedModelError

from ..cache.kv_cache import LayerShape
from ..kernels.attention_spec import AttentionContext, AttentionSpec
from .masks import ASKING_NAME, Limits

ATTENTION_NAME = "specdec"
CONTEXT = "specdec_context"
"""The keyword argument of attention layers that carries an `AttentionContext`."""
MODULES = "specdec_modules"
"""The one that collects the modules that attend, by layer."""
MASKS = "specdec_masks"
"""The one that collects what the masks of layers would say."""

_carried: ContextVar[Mapping[str, Any] | None] = ContextVar("specdec_carried", default=None)
_INERT_TENSORS = {"position_ids", "cache_position", "logits_to_keep"}


def paged_attention(  # noqa: PLR0913  # transformers' interface
    module: torch.nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, Hkv, N, D]
    value: Tensor,  # [1, Hkv, N, Dv]
    attention_mask: Tensor | Limits | None,
    *,
    scaling: float | None = None,
    specdec_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [Hq] sinks
    specdec_limits: tuple[int | None, int | None] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # [1, N, Hq, Dv]
    """transformers' attention interface over an `AttentionContext`."""
    if specdec_context is None:
        own: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return paged_attention(module, query, key, value, attention_mask, **own, **others, **_carried_arguments())
    if not getattr(module, "is_causal", True):  # the library's own attention functions read it like this
        raise _unserved(module, "attends to later tokens as well")
    if attention_mask is not None and not _is_limit(attention_mask):  # nothing here would look at it
        raise _unserved(module, "is given a mask of the model's own")
    for name, given in others.items():
        if isinstance(given, Tensor) and name not in _INERT_TENSORS:
            raise _unserved(module, f"takes arguments that the engine does not implement: {name}")
    layer: int = module.layer_idx  # type: ignore[assignment]  # set by every attention layer of the library
    if MODULES in others:
        others[MODULES][layer] = module
    if MASKS in others and attention_mask is not None:
        others[MASKS][layer] = attention_mask
    chunk = None
    if specdec_limits is not None:
        sliding_window, chunk = specdec_limits
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = specdec_context.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        _plain_spec(scale, sliding_window, softcap)
        if chunk is None and s_aux is None
        else AttentionSpec(scale, sliding_window, softcap, chunk, s_aux),
    )
    return output[None].contiguous(), None  # as the library's own attention functions do: some models view it


@lru_cache
def _plain_spec(scale: float, window: int | None, softcap: float | None) -> AttentionSpec:
    """Looked up, because to make one takes longer, and each layer asks in each step."""
    return AttentionSpec(scale, window, softcap)


def _is_limit(mask: Any) -> bool:
    return isinstance(mask, Limits) and mask.is_served


def _carried_arguments() -> Mapping[str, Any]:
    """Raises Refusal where nothing serves attention."""
    carried = _carried.get()
    if carried is None:
        raise Refusal(
            "its draft network attends, and no draft KV is declared", "declare Needs(extensions=(DraftKV(...),))"
        )
    return carried


def carry_arguments(*modules: torch.nn.Module) -> None:
    """Attention is given the arguments of a model, and of its decoder, that their layers do not hand on."""
    for module in modules:
        module.register_forward_pre_hook(_keep_arguments, with_kwargs=True)
        module.register_forward_hook(_drop_arguments, always_call=True)


def _keep_arguments(module: torch.nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if CONTEXT in named:
        _carried.set({name: named[name] for name in (CONTEXT, MODULES, MASKS) if name in named})


def _drop_arguments(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _carried.set(None)


def _unserved(module: torch.nn.Module, what: str) -> UnsupportedModelError:
    return unserved_attention(f"its attention {what}", layer=type(module).__name__)


def unserved_attention(reason: str, **where: object) -> UnsupportedModelError:
    """SD-E141."""
    return UnsupportedModelError("SD-E141", "this model's attention is not served", {**where, "reason": reason})


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionInterface.register(ASKING_NAME, paged_attention)


def attention_arguments(context: AttentionContext) -> dict[str, Any]:
    """The keyword arguments that carry a context through modelling code down to `paged_attention`."""
    return {CONTEXT: context}


@contextmanager
def attending_by(implementation: str, model: Any) -> Iterator[None]:
    """Another attention implementation of transformers, for a while, in a model that runs by ours."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


@dataclass
class ShapeProbe:
    """Serves one forward pass without a cache and records what each layer would store."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)  # that the layers ask for
    masks: dict[int, Limits] = field(default_factory=dict)  # what their masks would say
    dtypes: set[torch.dtype] = field(default_factory=set)  # that they compute in

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Plain causal attention over the tokens of this pass."""
        if layer in self.layers:
            raise unserved_attention("it attends more than once in a pass", layer=layer)
        self.layers[layer] = LayerShape(keys.shape[1], keys.shape[2], values.shape[2])
        self.windows[layer] = spec.window
        self.dtypes |= {query.dtype, keys.dtype, values.dtype}
        query, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, keys, values))
        output = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=spec.scale, enable_gqa=True)
        return output[0].transpose(0, 1)
