"""Self-speculation: the target's first layers, its final norm and its head draft for all of its layers."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, Refusal, TargetInfo
from specdec.sdk.extensions import TargetLayers
from specdec.sdk.model_proposer import CachedTargetProposer, ModelOptions


class LayerSkipOptions(ModelOptions):
    """Options of the layer_skip proposer."""

    exit_layer: int | None = Field(
        default=None, ge=1, description="how many of the target's layers draft. None: a quarter of them"
    )


class LayerSkipProposer(CachedTargetProposer):
    """Drafts with the target's own first layers, as in LayerSkip (arXiv 2404.16710). It has no checkpoint.

    The method is lossless with any target. It pays where training let early layers predict, as in the LayerSkip
    checkpoints: other targets need nearly all layers to agree with themselves. The first layers read and write the
    target's cache, so a draft costs no cache and no pass over the prompt.
    """

    Options = LayerSkipOptions

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's first layers. Raises Refusal for an exit behind the last layer but one."""
        exit_layer = _exit_of(config, target)
        if exit_layer >= target.num_layers:
            reason = f"exit_layer is {exit_layer}, and the target has {target.num_layers} layers, which then all draft"
            raise Refusal(reason, f"an exit_layer of 1 .. {target.num_layers - 1}")
        run = TargetLayers(layers=tuple(range(exit_layer)), lookahead=config.num_draft_tokens)
        return cls.shared_needs(config, target, run)

    def build(self) -> None:
        """Take the layers. Raises Refusal where they do not run without the others."""
        self._layers = self.services.target_layers(range(_exit_of(self.config, self.target)))

    def advance(
        self, index: int, slots: Tensor, lengths: Tensor, token_ids: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one token of each request through the first layers."""
        positions = (lengths + index).clamp(max=self.target.max_model_len - 1)  # of rows whose budget is used up
        places = torch.arange(len(slots) + 1, device=slots.device)
        return (self._layers.logits(token_ids, slots, positions, places, places[:-1]),)


def _exit_of(config: ProposerConfig, target: TargetInfo) -> int:
    return config.options.exit_layer or max(target.num_layers // 4, 1)
