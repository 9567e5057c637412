"""Drafting with heads that read the tokens drafted before them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, TargetInfo
from specdec.sdk.model_proposer import AutoregressiveProposer, DraftInputs, Weights, draft_kv_of

from .checkpoint import UNUSED, HydraSpec, our_names
from .network import HydraHeads


class HydraProposer(AutoregressiveProposer):
    """Hydra (arXiv 2402.05109) along its most likely chain: head i drafts the token i + 1 places after the newest.

    A prefix layer runs over the target's final hidden states, one row per position, and keeps KV of them. Head i reads
    the last row's output, the newest token and the i tokens drafted before it. Drafting writes no rows.
    """

    INPUTS_ARE_SHIFTED = True

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's final hidden states, draft KV of one layer, and as many drafts as heads.

        Raises Refusal if the heads do not fit the target or are of another kind; CheckpointError: SD-E146, SD-E170 ..
        SD-E172.
        """
        spec = HydraSpec.read(cls.open_checkpoint(config), target)
        kv = draft_kv_of(spec.decoder, num_layers=1, lookahead=config.num_draft_tokens - 1, dtype=config.network.dtype)
        return cls.shared_needs(config, target, kv, hidden_states=("final",), max_draft_tokens=spec.num_heads)

    def build(self) -> None:
        """Load as many heads as K. Raises CheckpointError: SD-E172, SD-E174, SD-E175."""
        checkpoint, num_heads = self.open_checkpoint(self.config), self.config.num_draft_tokens
        spec = HydraSpec.read(checkpoint, self.target)
        weights = Weights(our_names(self.services.load_tensors(checkpoint.directory)), checkpoint.directory)
        weights.drop(*UNUSED)
        for unused in range(num_heads, spec.num_heads):
            weights.drop(f"blocks.{unused}.*", f"lm_heads.{unused}.*")
        decoder = self.services.build_decoder(spec.decoder, self.settings)
        with torch.device("meta"):  # no time for random weights
            self.network = HydraHeads(spec, decoder, num_heads)
        for heads in (self.network.blocks, self.network.lm_heads):
            heads.to_empty(device=self.services.device)
        weights.fill(self.network)
        self.network.embedding = self.load_embedding(weights, spec.hidden_size)
        weights.finish()
        self.services.finish(self.network, self.settings)

    def first(self, inputs: DraftInputs) -> Tensor:
        """Run the prefix layer over what was committed; the newest token stands beside its last row."""
        assert inputs.hidden is not None, "declared"
        prefix = self.network(inputs.hidden, inputs.positions, inputs.attention)
        return self.network.with_token(prefix[inputs.last], inputs.token_ids[inputs.last])

    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """Draft one more token behind the others."""
        return self.network.with_token(states, inputs.token_ids)

    def logits(self, states: Tensor) -> Tensor:
        """The logits of the head that reads as many tokens."""
        return self.network.logits(states)
