"""What the engine provides to a model-based proposer, which never touches the runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .extensions import (
    DraftKVServices,
    GrammarServices,
    GraphServices,
    NetworkServices,
    TargetKVServices,
    TargetLayersServices,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .types import TargetInfo


class Services(
    DraftKVServices, GrammarServices, GraphServices, NetworkServices, TargetKVServices, TargetLayersServices, Protocol
):
    """What the engine provides from `bind` until `close`, within its calls and on their thread.

    Extensions add their own methods. Under tensor parallelism `embed` and `lm_head` are collectives: every rank calls
    them in the same order, with the same shapes.
    """

    @property
    def target(self) -> TargetInfo:
        """The facts that `bind` gets too."""
        ...

    @property
    def device(self) -> torch.device:
        """The target's device."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The target's transformers tokenizer. None means that the engine runs on token ids only."""
        ...

    @property
    def logit_scale(self) -> float:
        """The factor that the target applies to the output of its lm_head."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's input embeddings: [..., H] for [...] int64."""
        ...

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of final hidden states [..., H], without `logit_scale`."""
        ...

    def load_tensors(self, checkpoint: str | Path, prefixes: Sequence[str] = ("",)) -> dict[str, Tensor]:
        """The tensors of a checkpoint directory whose names start with one of `prefixes`, on the engine's device.

        Reads *.safetensors, else pytorch_model.bin and other *.bin, *.pt (weights only). Raises ConfigError SD-E146 for
        a missing or truncated file.
        """
        ...
