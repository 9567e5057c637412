"""What one forward pass of a target takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..cache.state_store import StatePass
from ..kernels.attention_spec import AttentionContext


@dataclass(frozen=True)
class ForwardInput:
    """A ragged batch as tensors: N tokens of one or more requests, R rows whose logits are needed."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    logits_rows: Tensor  # [R] int64, indices into the N tokens
    cache: AttentionContext  # where attention finds earlier keys and values and puts the new ones
    states: StatePass | None = None  # of layers that keep a state; None: the target has none
