"""Drafting with the multi-token-prediction modules of the target's own checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from pydantic import Field
from torch import nn

from specdec.sdk import Draft, Needs, ProposerConfig, Refusal, Services, StepView, TargetInfo
from specdec.sdk.model_proposer import ModelOptions, Weights
from specdec.sdk.model_proposer.autoregressive import HeadProposer

from .chain import ModuleChain
from .checkpoint import MtpSpec
from .layouts import Recycled
from .network import MtpModule


class MtpOptions(ModelOptions):
    """Options of the mtp proposer."""

    recycled_hidden: Recycled | None = Field(
        default=None,
        description="what later steps read: the module's output after its final norm, or before; None: as trained",
    )
    num_modules: int | None = Field(
        default=None,
        ge=1,
        description="how many of the checkpoint's modules draft. 1: the first drafts every token; None: all",
    )


class MtpProposer(HeadProposer):
    """Multi-token prediction (arXiv 2412.19437): the target's layers for tokens behind the next one.

    Without `model` the modules are those in the target's own checkpoint. A single one drafts every token, run K times
    in a row: row i of its draft KV holds the token after position i with the target's final hidden state at i. Of
    several modules each drafts one token (`ModuleChain`).
    """

    DRAFTS_TREES = True
    Options = MtpOptions

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's final hidden states, and draft KV of one layer per module. Several modules see whole prompts.

        Raises Refusal if the target has no such module, it does not fit, or K is more than several modules draft;
        CheckpointError: SD-E105, SD-E146, SD-E175.
        """
        spec = MtpSpec.read(config, target)
        kv = cls.draft_kv(config, spec.decoder, num_layers=len(spec.indices))
        most = spec.num_modules if spec.num_modules > 1 else None
        if most is not None and config.max_nodes is not None:
            raise Refusal("max_nodes: its modules draft a chain, one token each", "num_speculative_tokens alone")
        # A row of module k reads k + 1 tokens behind it: a block's last rows belong to one text, and cannot be shared.
        several = len(spec.indices) > 1
        return cls.shared_needs(
            config, target, kv, hidden_states=("final",), max_draft_tokens=most, whole_prompt=several
        )

    @classmethod
    def default_draft_tokens(cls, model: str | None) -> int:
        """The number of tokens that the module was trained for. 1 if nothing states it."""
        return cls.draft_tokens_of(model) or 1

    def build(self) -> None:
        """Load the modules and tie them to the target. Raises CheckpointError: SD-E172, SD-E174, SD-E175; Refusal."""
        spec = MtpSpec.read(self.config, self.target)
        decoder = self.services.build_decoder(spec.decoder, self.settings)
        modules = [self._module(spec, decoder, depth) for depth in range(len(spec.indices))]
        self.network = modules[0]
        self._further = nn.ModuleList(modules[1:])  # an attribute, because new weights are copied into attributes
        self._modules = ModuleChain(modules, self) if len(modules) > 1 else None

    def _module(self, spec: MtpSpec, decoder: Any, depth: int) -> MtpModule:
        module = MtpModule(spec, decoder, depth)
        weights = _open_weights(spec, spec.indices[depth], self.services, module.state_dict().keys())
        weights.fill(module)
        module.embedding = self.load_embedding(weights, spec.hidden_size)
        scale = spec.checkpoint.logit_scale
        module.head = self.load_head(weights, spec.hidden_size, self.target.vocab_size, logit_scale=scale)
        weights.finish()
        self.services.finish(module, self.settings)
        return module

    @torch.inference_mode()
    def observe(self, step: StepView) -> None:
        """Run the rows whose tokens the step decided."""
        if self._modules is None:
            super().observe(step)
        else:
            self._modules.observe(step)

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        return super().propose(step) if self._modules is None else self._modules.propose(step)


def _open_weights(spec: MtpSpec, index: int, services: Services, wanted: Collection[str]) -> Weights:
    """Read one module, and nothing else of the checkpoint. `wanted`: the names that the network has places for.

    Raises CheckpointError SD-E146.
    """
    directory = spec.checkpoint.directory
    weights = Weights(services.load_tensors(directory, spec.layout.prefixes(index)), directory)
    for published, ours in spec.layout.renames(index).items():
        weights.rename(published, ours)
    for inside in wanted:  # some publishers keep beside the router what transformers keeps in it
        weights.rename(inside.replace(".mlp.gate.", ".mlp."), inside)
    weights.drop(*spec.layout.further_modules(), "*rotary_emb.inv_freq", "verifier_*")
    return weights
