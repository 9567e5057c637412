"""A head on hidden states with draft KV, on the base for it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, Refusal, TargetInfo
from specdec.sdk.model_proposer import AutoregressiveProposer, DraftInputs, ModelOptions, TargetHead, load_module


class Mixed(torch.nn.Module):
    def __init__(self, decoder: torch.nn.Module, width: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.down = torch.nn.Linear(2 * width, width)

    def mixed(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.relu(torch.nn.functional.linear(torch.cat((embedded, hidden), dim=-1), self.down.weight))


class Head(AutoregressiveProposer):
    default_model = "tiny/eagle"
    INPUTS_ARE_SHIFTED = True

    class Options(ModelOptions):
        scale: float = 1.0

    config: ProposerConfig[Options]

    @classmethod
    def default_draft_tokens(cls, model: str | None) -> int:
        return 3

    @classmethod
    def needs(cls, config: ProposerConfig[Options], target: TargetInfo) -> Needs:
        checkpoint = cls.open_checkpoint(config)
        if checkpoint.get("hidden_size", int) != target.hidden_size:
            raise Refusal("the head is for another target", "a head that was trained for this one")
        kv = cls.draft_kv(config, checkpoint.config, num_layers=1)
        return cls.shared_needs(config, target, kv, hidden_states=("final",))

    def build(self) -> None:
        checkpoint = self.open_checkpoint(self.config)
        self._network = Mixed(
            self.services.build_decoder(checkpoint.config, self.settings), self.services.target.hidden_size
        )
        load_module(self._network, self.services.load_tensors(checkpoint.directory), checkpoint.directory)
        self.services.finish(self._network, self.settings)
        self._head = TargetHead(self.services)

    def first(self, inputs: DraftInputs) -> Tensor:
        assert inputs.hidden is not None
        return self._network.mixed(self.services.embed(inputs.token_ids), inputs.hidden)[inputs.last]

    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        return self._network.mixed(self.services.embed(inputs.token_ids), states) * self.config.options.scale

    def logits(self, states: Tensor) -> Tensor:
        return self._head.forward(states)
