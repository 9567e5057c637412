"""Drafting with stages in a row, each of which reads the token drafted before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, StepView, TargetInfo
from specdec.sdk.model_proposer import CachedTargetProposer, load_module

from .checkpoint import MlpSpec, our_tensors
from .network import MlpSpeculator


class MlpSpeculatorProposer(CachedTargetProposer):
    """IBM's MLP speculator (arXiv 2404.19124) along its most likely chain.

    Stage i reads the state behind the stage before it, at first the target's final hidden state that gave the newest
    token. It mixes in the newest token and drafts the next one. There is no draft KV and no state from step to step.
    """

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's final hidden states, and as many drafts as stages.

        Raises Refusal if the stages do not fit the target or are Arctic's; CheckpointError: SD-E146, SD-E170 ..
        SD-E172.
        """
        spec = MlpSpec.read(cls.open_checkpoint(config), target)
        return cls.shared_needs(config, target, hidden_states=("final",), max_draft_tokens=spec.num_stages)

    def build(self) -> None:
        """Load as many stages as K. Raises CheckpointError: SD-E171, SD-E172, SD-E174, SD-E175."""
        checkpoint, num_stages = self.open_checkpoint(self.config), self.config.num_draft_tokens
        spec = MlpSpec.read(checkpoint, self.target)
        tensors = self.services.load_tensors(checkpoint.directory)
        with torch.device("meta"):  # no time for random weights
            self.network = MlpSpeculator(spec, num_stages)
        self.network.to_empty(device=self.services.device)
        load_module(self.network, our_tensors(tensors, spec, num_stages, checkpoint), checkpoint.directory)
        self.services.finish(self.network, self.settings)

    def first_states(self, step: StepView) -> Sequence[Tensor]:
        """The target's final hidden states that gave the newest tokens."""
        return (step.kept.hidden_cat(step.kept.last),)

    def advance(
        self, index: int, slots: Tensor, lengths: Tensor, token_ids: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one stage."""
        (before,) = states
        state = self.network(index, before if index else self.network.start(before), token_ids)
        return self.network.logits(index, state), state
