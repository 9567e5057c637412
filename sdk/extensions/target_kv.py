"""The keys and values that the target has cached, to be read by a draft network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self

from pydantic import Field

from ..config import Extension

if TYPE_CHECKING:
    from torch import Tensor


class TargetKV(Extension):
    """Layers of the target whose cached keys and values are read: `Services.target_kv`."""

    name: ClassVar[str] = "target_kv"
    version: ClassVar[int] = 1

    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, description="every layer that may be read")

    def united(self, other: Self) -> Self:
        """The layers of both."""
        return self.replace(layers=tuple(dict.fromkeys((*self.layers, *other.layers))))


class TargetKVReader(Protocol):
    """The keys and values that the target has cached, by (slot, position). They can be read, and never written.

    Slot and position are those of the step. Positions from `KeptTokens.next_position` on are undefined: rejected drafts
    lie there. Layers with a sliding window keep every position too, and the layer that reads says how many it sees.
    Keys are stored as the target's attention takes them, after its norms and its rotary embedding.
    """

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values [length, heads, head_dim] of positions 0 .. length-1 of one slot."""
        ...

    def attention(self, slots: Tensor, lengths: Tensor, layers: Sequence[int]) -> Mapping[str, Any]:
        """Keyword arguments for the attention of a network built by these services, for one pass that only reads.

        Layer i of the network attends to the target's layer `layers[i]`. Its own keys and values are ignored. Query n
        sees positions 0 .. lengths[n]-1 of slot slots[n]. A layer with a sliding window W sees the last W of them.

        slots, lengths: one entry for each query of the pass, [N].
        layers: each of them declared.
        """
        ...


class TargetKVServices(Protocol):
    """The method of `Services` for the target's keys and values."""

    def target_kv(self) -> TargetKVReader:
        """The target's cache, of the layers in `TargetKV.layers`. Raises Refusal if it was not asked for.

        Take it in `bind`, and read it once there are requests.
        """
        ...
