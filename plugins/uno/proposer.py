"""Drafting with the target itself: one pass over rows of noise, which an adapter has learnt to look through."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.sdk import Needs, ProposerConfig, StepView, TargetInfo
from specdec.sdk.extensions import TargetLayers
from specdec.sdk.model_proposer import ParallelProposer, load_adapter, read_adapter

_MIXER = 0x45D9F3B  # an odd number whose product with 32 bits fits into 63
_BITS = 0xFFFFFFFF


class UnoProposer(ParallelProposer):
    """Uno (SGLang's `--uno-lora-path`, vLLM #55947): the target with LoRA weights drafts a block in one pass.

    The newest token runs as in the target, and so does its draft: it is the target's own next token. Rows of random
    tokens follow it, with the adapter. Each gives the token behind it, from a distribution of its own. The pass lies
    in the target's cache, where the next step computes the same positions again.

    A draft pass costs as much as the target's. It pays if more than one row of noise is right on average.
    """

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """All layers of the target, over as many rows as drafts.

        Raises Refusal for an adapter of another kind than LoRA; CheckpointError: SD-E146, SD-E170 .. SD-E172, SD-E174,
        SD-E298.
        """
        read_adapter(cls.open_checkpoint(config))
        run = TargetLayers(layers=tuple(range(target.num_layers)), lookahead=config.num_draft_tokens)
        return cls.shared_needs(config, target, run, min_draft_tokens=2)

    def build(self) -> None:
        """Load the adapter. Raises CheckpointError SD-E297 where it does not fit the target."""
        checkpoint = self.open_checkpoint(self.config)
        adapter = load_adapter(checkpoint, self.services.load_tensors(checkpoint.directory))
        self.network = nn.ModuleList(adapter.values())
        self.services.finish(self.network, self.settings)
        self._layers = self.services.target_layers(range(self.target.num_layers), adapter)

    def block_inputs(self, step: StepView) -> Sequence[Tensor]:
        """Where each block goes, and its first token."""
        return step.slots, step.kept.next_position, step.newest_token

    def block_logits(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        """The first row's are the target's own, the others' those of the adapter."""
        slots, starts, newest = inputs
        places = torch.arange(num_tokens, device=slots.device)
        ids = noise(starts[:, None] + places, self.target.vocab_size)
        ids[:, 0] = newest
        bounds = torch.arange(len(slots) + 1, device=slots.device) * num_tokens
        every = torch.arange(ids.numel(), device=slots.device)
        adapted = (places > 0).expand(len(slots), -1).flatten()
        logits = self._layers.logits(ids.flatten(), slots, starts, bounds, every, adapted)
        return logits.view(len(slots), num_tokens, -1)


def noise(positions: Tensor, vocab_size: int) -> Tensor:
    """A token for each position, evenly spread over the vocabulary: the same ones in every request and run."""
    mixed = (positions + 1) & _BITS
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * _MIXER) & _BITS
    return (mixed ^ (mixed >> 16)) % vocab_size
