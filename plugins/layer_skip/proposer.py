"""Self-speculation: the target's first layers, its final norm and its head draft for all of its layers."""

from __future__ import annotations

import logging

import torch
from pydantic import Field
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, Refusal, TargetInfo
from specdec.sdk.extensions import LayerRunner, TargetLayers
from specdec.sdk.model_proposer import CachedTargetProposer, ModelOptions

from .search import best_exit, candidates, logits_of

logger = logging.getLogger(__name__)


class LayerSkipOptions(ModelOptions):
    """Options of the layer_skip proposer."""

    exit_layer: int | None = Field(
        default=None,
        ge=1,
        description="how many of the target's layers draft. None: a search at the start finds the number that promises "
        "most on a text that the target writes",
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
        """The target's layers: the first ones, or all of them where the exit is to be searched for.

        Raises Refusal for an exit behind the last layer but one.
        """
        asked = config.options.exit_layer
        if asked is not None and asked >= target.num_layers:
            reason = f"exit_layer is {asked}, and the target has {target.num_layers} layers, which then all draft"
            raise Refusal(reason, f"an exit_layer of 1 .. {target.num_layers - 1}")
        layers = tuple(range(target.num_layers if asked is None else asked))
        run = TargetLayers(layers=layers, lookahead=config.num_draft_tokens)
        return cls.shared_needs(config, target, run)

    def build(self) -> None:
        """Take the layers of every exit in question. Raises Refusal where they do not run without the others."""
        asked, num_layers = self.config.options.exit_layer, self.target.num_layers
        exits = candidates(num_layers) if asked is None else [asked]
        self._exits = {each: self.services.target_layers(range(each)) for each in exits}
        self._layers = self._exits[exits[0]]
        self._whole = self.services.target_layers(range(num_layers)) if asked is None else None

    def warmup(self) -> None:
        """Find the exit, if none was asked for."""
        if self._whole is not None:
            self._layers = self._exits[self._found(self._whole)]
        super().warmup()

    def advance(
        self, index: int, slots: Tensor, lengths: Tensor, token_ids: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one token of each request through the first layers."""
        positions = (lengths + index).clamp(max=self.target.max_model_len - 1)  # of rows whose budget is used up
        places = torch.arange(len(slots) + 1, device=slots.device)
        return (self._layers.logits(token_ids, slots, positions, places, places[:-1]),)

    @torch.inference_mode()
    def _found(self, whole: LayerRunner) -> int:
        device, k = self.services.device, self.config.num_draft_tokens
        exits = {number: logits_of(layers, device) for number, layers in self._exits.items()}
        found = best_exit(exits, logits_of(whole, device), self.target, k)
        said = "layer_skip drafts with %d of %d layers: %.0f %% of its tokens are theirs, expected speed-up %.2f"
        logger.info(said, found.num_layers, self.target.num_layers, 100 * found.agreement, found.speedup)
        return found.num_layers
