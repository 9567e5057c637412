"""What the engine provides to a proposer: the target's embedding and head, its KV blocks, its loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.sdk.checkpoint import load_tensors
from specdec.sdk.checkpoint import logit_scale as stated_logit_scale
from specdec.sdk.config import NetworkSettings
from specdec.sdk.extensions import (
    AttentionMode,
    DraftKV,
    DraftKVStore,
    Grammars,
    Graphs,
    LayerRunner,
    Networks,
    TargetKV,
    TargetKVReader,
    TargetLayers,
)
from specdec.sdk.needs import Needs
from specdec.sdk.types import TargetInfo

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache, LayerShape
from ..kernels.backend import Backend
from ..model.attention import attention_arguments
from ..model.inference_form import freeze_tables
from ..request.grammar import RequestGrammar
from . import draft_networks
from .target_access import CachedKV, CachedLayers, EarlyPasses, OwnLayers, TargetCache, not_asked_for, require


class LayerSource(Protocol):
    """A model that shares its embedding and head."""

    @property
    def model(self) -> Any: ...  # get_input_embeddings, get_output_embeddings
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


KVStorage = Sequence[tuple[Tensor, Tensor]]
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes another form of a function of tensors."""


class BlockDraftKV:
    """Draft KV on the blocks that the target's cache gives each request.

    There is none of it until `lay_out`: a cache is sized from the memory that a bound drafter leaves.
    """

    _cache: KVCache
    _addressing: Addressing

    def __init__(self, spec: DraftKV, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._dtype = dtype if spec.dtype is None else getattr(torch, spec.dtype)

    def lay_out(self, num_blocks: int, addressing: Addressing, storage: KVStorage | None = None) -> None:
        """Allocate it. `num_blocks`: those of the pool; what the addressing needs beyond them is added.

        storage: keys and values of each layer, where another engine allocated them. None: they are allocated here.
        """
        spec = self._spec
        layer = LayerShape(spec.num_heads, spec.head_dim, spec.value_head_dim or spec.head_dim)
        num_blocks += addressing.num_pad_blocks
        layers = [layer] * spec.num_layers
        self._cache = KVCache(layers, num_blocks, addressing.block_size, self._dtype, self._device, storage=storage)
        self._addressing = addressing

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, heads, head_dim] of the tokens at (slots [N], positions [N])."""
        places = self._addressing.slots(slots, positions).to(self._cache.device)
        self._cache.keys[layer].index_copy_(0, places, keys)
        self._cache.values[layer].index_copy_(0, places, values)

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, heads, head_dim] of positions 0 .. length-1; a view where blocks are adjacent."""
        places = self._addressing.slots_of_row(self._cache, slot, length)
        return self._cache.keys[layer][places], self._cache.values[layer][places]

    def attention(
        self,
        slots: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        mode: AttentionMode = "causal",
        parents: Tensor | None = None,
    ) -> Mapping[str, Any]:
        """What our attention function takes: where the pass's keys and values go, and what its queries see."""
        return attention_arguments(self._addressing.of_rows(self._cache, slots, starts, cu_queries, mode, parents))


@dataclass(frozen=True)
class Provided:
    """What an engine provides beside its target. None: it has nothing of the kind."""

    capture: Form | None = None  # a captured one
    compiling: Form | None = None  # a compiled one
    own_layers: OwnLayers | None = None  # runs some of the target's layers
    grammar_of: Callable[[str], RequestGrammar | None] | None = None  # by a request's id; its None: output is free


class EngineServices:
    """`specdec.sdk.Services` over this engine, as far as a proposer asked for them."""

    def __init__(
        self,
        info: TargetInfo,
        needs: Needs,
        target: LayerSource,
        tokenizer: Any,
        backend: Backend,
        moe_backend: str | None = None,
        provided: Provided = Provided(),
    ) -> None:
        """backend: lays networks out. `lay_out_draft_kv` and `use_cache` follow."""
        self.target = info
        self.tokenizer = tokenizer
        self.device = target.device
        self.dtype = target.dtype
        self._needs = needs
        self._embedding: Callable[[Tensor], Tensor] = target.model.get_input_embeddings()
        self._head: Callable[[Tensor], Tensor] = target.model.get_output_embeddings()
        spec = needs.extension(DraftKV)
        self._draft_kv = None if spec is None else BlockDraftKV(spec, target.dtype, target.device)
        self._cache = TargetCache()
        self._moe_backend = moe_backend
        self._provided = provided
        self._backend = backend

    def lay_out_draft_kv(self, num_blocks: int, addressing: Addressing, storage: KVStorage | None = None) -> None:
        """Allocate the draft KV, if there is any. `num_blocks`, `addressing`: of the cache whose blocks it shares.

        storage: see `BlockDraftKV.lay_out`.
        """
        if self._draft_kv is not None:
            self._draft_kv.lay_out(num_blocks, addressing, storage)

    def use_cache(self, kv: KVCache, addressing: Addressing) -> None:
        """The target's cache is made: what was declared of it may be used."""
        self._cache.kv, self._cache.addressing = kv, addressing
        if self._needs.extension(TargetLayers) is not None and addressing.table is not None:
            self._cache.passes = EarlyPasses(addressing.table.pad_row, kv.device)

    @property
    def passes(self) -> EarlyPasses | None:
        """Keeps passes over layers of the target off what it computed."""
        return self._cache.passes

    @property
    def logit_scale(self) -> float:
        """The configuration's factor on the head's output; 1 where it has none."""
        return stated_logit_scale(self.target.config) or 1.0

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's input embeddings: [..., H] for [...] int64."""
        return self._embedding(token_ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of final hidden states [..., H], without `logit_scale`."""
        return self._head(hidden)

    def load_causal_lm(
        self, checkpoint: str | Path, settings: NetworkSettings, tensors: Mapping[str, Tensor] | None = None
    ) -> Any:
        """A transformers causal LM ready to run on the draft KV. Raises ConfigError, UnsupportedModelError."""
        require(self._needs, Networks, "Services.load_causal_lm")
        inherited = self._inherited(settings)
        model = draft_networks.load_causal_lm(str(checkpoint), inherited, self.device, self._backend, tensors or {})
        self._serve(model.get_decoder())
        return model

    def build_decoder(self, config: Mapping[str, Any], settings: NetworkSettings) -> Any:
        """A transformers decoder with random weights. Raises Refusal for a configuration that cannot be served."""
        require(self._needs, Networks, "Services.build_decoder")
        return draft_networks.build_decoder(config, self._inherited(settings), self.device)

    def finish(self, network: nn.Module, settings: NetworkSettings) -> None:
        """Device, dtype, quantization and the layout of weights, in place."""
        require(self._needs, Networks, "Services.finish")
        draft_networks.finish(network, self._inherited(settings), self.device, self._backend)
        self._serve(network)

    def _serve(self, network: nn.Module) -> None:
        """The last that is done to a network."""
        freeze_tables(network, self.target.max_model_len)
        if self._provided.compiling is not None:
            network.forward = self._provided.compiling(network.forward)

    def _inherited(self, settings: NetworkSettings) -> NetworkSettings:
        """The settings with the target's in the place of what was left open."""
        return settings.replace(
            dtype=settings.dtype or str(self.dtype).removeprefix("torch."),
            moe_backend=settings.moe_backend or self._moe_backend,
        )

    def load_tensors(self, checkpoint: str | Path, prefixes: Sequence[str] = ("",)) -> dict[str, Tensor]:
        """The tensors whose names start with one of `prefixes`. Raises ConfigError SD-E146."""
        return load_tensors(Path(checkpoint), tuple(prefixes), str(self.device))

    def draft_kv(self) -> DraftKVStore:
        """The store of what `DraftKV` asked for."""
        if self._draft_kv is None:
            raise not_asked_for(DraftKV, "Services.draft_kv")
        return self._draft_kv

    def target_kv(self) -> TargetKVReader:
        """The target's cache, of the layers that `TargetKV` asked for."""
        return CachedKV(self._cache, require(self._needs, TargetKV, "Services.target_kv").layers)

    def target_layers(self, layers: Sequence[int], adapter: Mapping[str, nn.Module] | None = None) -> LayerRunner:
        """Layers of the target, of those that `TargetLayers` asked for."""
        asked = self._needs.extension(TargetLayers)
        undeclared = sorted(set(layers) - set(asked.layers if asked else ()))
        if undeclared or not layers or self._provided.own_layers is None:
            raise not_asked_for(TargetLayers, f"layers {undeclared or list(layers)} of Services.target_layers")
        return CachedLayers(self._cache, self._provided.own_layers(layers, adapter or {}))

    def allowed(self, request_id: str, suffix: Sequence[int] = ()) -> Tensor | None:
        """Which tokens may follow the request's newest token and `suffix`: [V] bool. None means any."""
        grammar = self._grammar(request_id, "Services.allowed")
        return None if grammar is None else grammar.allowed(suffix, self.target.vocab_size)

    def forced(self, request_id: str) -> str:
        """The text that must follow the request's newest token."""
        grammar = self._grammar(request_id, "Services.forced")
        return "" if grammar is None else grammar.forced()

    def _grammar(self, request_id: str, service: str) -> RequestGrammar | None:
        require(self._needs, Grammars, service)
        return None if self._provided.grammar_of is None else self._provided.grammar_of(request_id)

    def capture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        require(self._needs, Graphs, "Services.capture")
        return function if self._provided.capture is None else self._provided.capture(function)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        require(self._needs, Graphs, "Services.compile")
        return function if self._provided.compiling is None else self._provided.compiling(function)
