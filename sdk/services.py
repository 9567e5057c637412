"""What the engine lends a model-based proposer, so that it never touches the runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .types import TargetInfo


class DraftKVStore(Protocol):
    """Draft KV addressed by (row, position), laid out on the target's blocks; a rejected row is simply overwritten."""

    def write(self, layer: int, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, heads, head_dim] of the tokens at (rows [N], positions [N])."""
        ...

    def read(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, heads, head_dim] of positions 0 .. length-1 of one row."""
        ...


class Services(Protocol):
    """Lent at `bind`; valid until `close`."""

    @property
    def target(self) -> TargetInfo: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tokenizer(self) -> Any:
        """The target's transformers tokenizer, or None if the engine runs on token ids only."""
        ...

    @property
    def logit_scale(self) -> float:
        """Factor that the target applies to the output of its lm_head."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's input embeddings: [..., H] for [...] int64."""
        ...

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of final hidden states [..., H], without `logit_scale`."""
        ...

    def load_causal_lm(self, checkpoint: str | Path, *, dtype: str | None, moe_backend: str | None) -> Any:
        """A transformers causal LM from a checkpoint, in eval mode on the engine's device."""
        ...

    def load_tensors(self, checkpoint: str | Path) -> dict[str, Tensor]:
        """All tensors of the safetensors files in a checkpoint directory, on the engine's device."""
        ...

    def draft_kv(self) -> DraftKVStore:
        """The store that `Needs.draft_kv` declared. Raises Refusal if none was declared."""
        ...

    def capture(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function as a replayable graph where the device has graphs, the function itself elsewhere."""
        ...
