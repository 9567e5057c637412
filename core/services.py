"""What the engine lends a proposer: the target's embedding and head, its blocks, its loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.sdk import ConfigError, DraftKV, DraftKVStore, Refusal, TargetInfo

from .runner.kv_cache import KVCache, LayerShape
from .runner.scheduler import Scheduler
from .runner.target import TargetModel, experts_settings


class BlockDraftKV:
    """Draft KV laid out on the blocks that the target's cache gave each request."""

    def __init__(
        self, spec: DraftKV, num_blocks: int, scheduler: Scheduler, dtype: torch.dtype, device: torch.device
    ) -> None:
        layer = LayerShape(spec.num_heads, spec.head_dim, spec.head_dim)
        self._cache = KVCache([layer] * spec.num_layers, num_blocks, scheduler.pool.block_size, dtype, device)
        self._scheduler = scheduler

    def write(self, layer: int, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, heads, head_dim] of the tokens at (rows [N], positions [N])."""
        size = self._cache.block_size
        blocks = {request.row: request.blocks for request in self._scheduler.running}
        places = zip(rows.tolist(), positions.tolist(), strict=True)
        slots = [blocks[row][position // size] * size + position % size for row, position in places]
        index = torch.tensor(slots, device=self._cache.device)
        self._cache.keys[layer].index_copy_(0, index, keys)
        self._cache.values[layer].index_copy_(0, index, values)

    def read(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, heads, head_dim] of positions 0 .. length-1; a view where blocks are adjacent."""
        blocks = next(request.blocks for request in self._scheduler.running if request.row == row)
        slots = self._cache.span(blocks, 0, length, length).slots
        return self._cache.keys[layer][slots], self._cache.values[layer][slots]


class EngineServices:
    """`specdec.sdk.Services` over this engine."""

    def __init__(self, info: TargetInfo, target: TargetModel, tokenizer: Any, draft_kv: DraftKVStore | None) -> None:
        self.target = info
        self.tokenizer = tokenizer
        self.device = target.device
        self.dtype = target.dtype
        self._embedding: Callable[[Tensor], Tensor] = target.model.get_input_embeddings()
        self._head: Callable[[Tensor], Tensor] = target.model.get_output_embeddings()
        self._draft_kv = draft_kv

    @property
    def logit_scale(self) -> float:
        """The configuration's factor on the head's output; 1 where it has none."""
        config = self.target.config
        return float(config.get("logit_scale") or 1 / (config.get("logits_scaling") or 1))

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's input embeddings: [..., H] for [...] int64."""
        return self._embedding(token_ids)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of final hidden states [..., H], without `logit_scale`."""
        return self._head(hidden)

    def load_causal_lm(self, checkpoint: str | Path, *, dtype: str | None, moe_backend: str | None) -> Any:
        """A transformers causal LM in eval mode on the engine's device. Raises ConfigError SD-E143."""
        experts = experts_settings(moe_backend)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype=dtype or str(self.dtype).removeprefix("torch."), **experts
            )
        except (OSError, ValueError, KeyError) as error:
            facts = {"because": str(error).splitlines()[0]}
            raise ConfigError("SD-E143", f"cannot load the draft model {str(checkpoint)!r}", facts) from error
        return model.to(self.device).eval()

    def load_tensors(self, checkpoint: str | Path) -> dict[str, Tensor]:
        """All tensors of the safetensors files in a directory. Raises ConfigError SD-E146 if there are none."""
        files = sorted(Path(checkpoint).glob("*.safetensors"))
        if not files:
            raise ConfigError("SD-E146", f"no *.safetensors file in {str(checkpoint)!r}")
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= load_file(file, device=str(self.device))
        return tensors

    def draft_kv(self) -> DraftKVStore:
        """The store that `Needs.draft_kv` declared."""
        if self._draft_kv is None:
            raise Refusal("draft_kv was asked for but not declared", "declare Needs(draft_kv=DraftKV(...))")
        return self._draft_kv

    def capture(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function itself: no device graphs are captured yet."""
        return function
