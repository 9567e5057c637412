"""Draft KV in the pages of vLLM's own cache: a cached prefix carries it, and vLLM plans for it and frees it.

Each draft layer is two layers to vLLM, one for keys and one for values, which are never run. A layer of vLLM's has two
parts of one size. So a layer of half the size, with one head, has a page with just the room of our keys or values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.extract_hidden_states import (
    CacheOnlyAttentionBackend,
    CacheOnlyAttentionMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from specdec.core.host import BlockPool, KVStorage, Request
from specdec.sdk.errors import Refusal
from specdec.sdk.extensions import DraftKV
from specdec.sdk.types import TargetInfo

from ..vllm_shared.rows import RequestRows
from .requests import Requests

NULL_BLOCK = 0
"""vLLM gives it to no request, and nobody reads what is in it."""


class InertMetadataBuilder(CacheOnlyAttentionMetadataBuilder):  # type: ignore[misc]
    """Supports every kind of graph. vLLM gives the target those that all layers support; no graph runs these."""

    _cudagraph_support = AttentionCGSupport.ALWAYS


class InertBackend(CacheOnlyAttentionBackend):  # type: ignore[misc]
    """An attention backend whose metadata costs nothing and that takes nothing from the target's."""

    @staticmethod
    def get_builder_cls() -> type[InertMetadataBuilder]:
        return InertMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class InertLayer(nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """Keys or values of one draft layer."""

    def __init__(self, num_heads: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.is_draft_layer = True
        self._shape, self._dtype = (num_heads, dim), dtype
        self.kv_cache = torch.empty(0)  # vLLM looks for it by this name

    def get_attn_backend(self) -> Any:
        return InertBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """The target's block size, so that one block table serves both."""
        num_heads, dim = self._shape
        block_size = vllm_config.cache_config.block_size
        return FullAttentionSpec(block_size, num_kv_heads=1, head_size=num_heads * dim // 2, dtype=self._dtype)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """vLLM's tensor: [blocks, 1, block_size, heads * dim], in this or another order of the same bytes."""
        self.kv_cache = kv_cache

    @property
    def slots(self) -> Tensor:
        """[slots, heads, dim]. Raises Refusal if vLLM laid the pages out in another way."""
        pages = self.kv_cache
        slots = pages.view(-1, *self._shape) if pages.is_contiguous() else pages.flatten()
        if slots.data_ptr() != pages.data_ptr():
            strides = tuple(pages.stride())
            raise Refusal(f"vLLM laid its cache out in strides {strides}", "vLLM's default layout of the KV cache")
        return slots


class Pages:
    """The layers of a proposer's draft KV, known to vLLM from here on. Made before vLLM asks for cache specs."""

    def __init__(self, spec: DraftKV, info: TargetInfo, vllm_config: Any, requests: Requests) -> None:
        """Raises Refusal for heads whose size vLLM's pages cannot hold."""
        self.rows = PagedRows(info.max_num_seqs, requests)
        self._block_size = 0  # until the group is found
        dims = (spec.head_dim, spec.value_head_dim or spec.head_dim)
        odd = [dim for dim in dims if spec.num_heads * dim % 2]
        if odd:
            raise Refusal(f"its draft KV has {spec.num_heads} heads of {odd[0]}, an odd number", "heads of even size")
        dtype = getattr(torch, spec.dtype or info.dtype)
        self.layers: dict[str, InertLayer] = {
            f"specdec_draft.layers.{2 * layer + kind}.attn": InertLayer(spec.num_heads, dim, dtype)
            for layer in range(spec.num_layers)
            for kind, dim in enumerate(dims)
        }
        vllm_config.compilation_config.static_forward_context.update(self.layers)

    def find_group(self, kv_cache_config: Any) -> int:
        """The one group that holds all of them. Its blocks have a size now: vLLM settles it behind `load_model`.

        Raises Refusal for a cache that separates or shortens them.
        """
        names = set(self.layers)
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
            if names <= set(group.layer_names) and all(type(each) is FullAttentionSpec for each in specs):
                self._block_size = spec.block_size
                return index
        raise Refusal("vLLM's cache has no group of full attention for draft KV", "a target with full attention")

    def storage(self) -> KVStorage:
        """Keys and values of each draft layer, once they are bound; the rows have their blocks from here on."""
        slots = [layer.slots for layer in self.layers.values()]
        self.rows.use(len(slots[0]), self._block_size)
        return list(zip(slots[::2], slots[1::2], strict=True))


class PagedRows(RequestRows):
    """Rows whose blocks are those that vLLM gave the request."""

    def __init__(self, num_rows: int, requests: Requests) -> None:
        super().__init__(num_rows, BlockPool(0, 1))
        self._given = requests

    def use(self, num_slots: int, block_size: int) -> None:
        """vLLM's cache has so many slots, in blocks of this size."""
        self.pool = BlockPool(num_slots // block_size, block_size, null_block=NULL_BLOCK)

    def hold(self, request: Request, num_tokens: int) -> None:
        """vLLM keeps room past the newest token, but none past its longest length: nobody reads what is put there."""
        blocks = self._given[request.request_id].blocks
        missing = -(-num_tokens // self.pool.block_size) - len(blocks)
        request.blocks = blocks + [NULL_BLOCK] * missing

    def unseat(self, request: Request) -> None:
        """Unseat the request. Its blocks are vLLM's, so nothing goes back to a pool."""
        request.blocks = []
        super().unseat(request)
