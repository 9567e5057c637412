"""Layers of the target that drafting runs itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol, Self

from pydantic import Field

from ..config import Extension

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TargetLayers(Extension):
    """Layers of the target that drafting runs itself: `Services.target_layers`."""

    name: ClassVar[str] = "target_layers"
    version: ClassVar[int] = 1

    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, description="every layer that may be run")
    lookahead: int = Field(default=1, ge=1, description="positions past the newest token that one draft writes")

    def united(self, other: Self) -> Self:
        """The layers of both. They draft one after the other, and each rewrites what the other one wrote."""
        layers = tuple(sorted({*self.layers, *other.layers}))
        return self.replace(layers=layers, lookahead=max(self.lookahead, other.lookahead))


class LayerRunner(Protocol):
    """Some of the target's own layers, between its embedding and its head.

    They read and write the target's cache. What a pass computes equals what the target would compute there, as far as
    the layers before it ran too. It stays until the target computes the same positions again: the next step computes
    every token from the newest one on in all layers, before anything attends to them.
    """

    def logits(
        self,
        token_ids: Tensor,
        slots: Tensor,
        starts: Tensor,
        cu_queries: Tensor,
        wanted: Tensor,
        adapted: Tensor | None = None,
    ) -> Tensor:
        """Run tokens, and return the logits [R, V] of some of them, as the target's head gives them.

        token_ids: of all requests, [M]. Each attends to its slot from position 0 up to itself.
        slots: the slot of each request, [B].
        starts: the position of each request's first token, `KeptTokens.next_position` or later, [B].
        cu_queries: request b has the tokens `cu_queries[b] : cu_queries[b+1]`, [B+1].
        wanted: places among the tokens, [R].
        adapted: tokens that run with the adapter, [M] bool. None means all, if there is an adapter.

        Raises ProposerError SD-E276 for starts before that. On a device nothing waits to look: such a pass begins at
        the newest token instead, and the error follows in the next step.
        """
        ...


class TargetLayersServices(Protocol):
    """The method of `Services` for the target's layers."""

    def target_layers(self, layers: Sequence[int], adapter: Mapping[str, torch.nn.Module] | None = None) -> LayerRunner:
        """Layers of the target in their order, as many of those in `TargetLayers.layers` as are wanted.

        Take them in `bind`, and run them in `warmup` and once there are requests.

        adapter: what is added to the outputs of linear layers while drafting runs them, by the dotted names of these
            layers in the target's modelling code. Each is a function of the layer's input: [..., in] -> [..., out]
            (`specdec.sdk.model_proposer.LowRank`). The target's own passes never see it. Entries of layers that do not
            run are left aside. None means none.

        Raises Refusal if they were not asked for, or if the target does not run without its other layers;
        CheckpointError SD-E297 if the adapter does not fit the target.
        """
        ...
