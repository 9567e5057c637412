"""What is asked of attention, whatever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Mode = Literal["causal", "causal_block", "full_block"]
"""Which keys a query sees: all before it and itself; the same, with windows counted from the pass's first query (a
block of drafts); or every key, with windows counted so."""


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of attention besides its tensors."""

    scale: float
    window: int | None = None  # a query sees this many positions, itself included; None: all before it
    softcap: float | None = None  # scores are softcap * tanh(scores / softcap)
    chunk: int | None = None  # a query sees its own chunk of so many positions, up to itself; None: all of them
    sinks: Tensor | None = None  # [Hq] scores of a key without a value, which takes its share of every softmax


class AttentionContext(Protocol):
    """What serves attention during one forward pass; travels through the model as a keyword argument."""

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor: ...


class StoredAttention(AttentionContext, Protocol):
    """Serves attention over a cache, also to those who may only read it."""

    def attend_stored(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend to what is stored, and store nothing: [N, Hq, D] -> [N, Hq, Dv]."""
        ...


class TreeAttention(StoredAttention, Protocol):
    """Serves attention over a cache where the last positions of each request are nodes of a tree."""

    def move_paths(self, places: Tensor) -> None:
        """Put the keys and values of accepted nodes where those of a chain lie.

        places: [B, 1 + D], 0 and the numbers of the accepted nodes plus 1, padded with -1.
        """
        ...
