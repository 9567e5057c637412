"""Drafting with the multi-token-prediction module of the target's own checkpoint."""

from __future__ import annotations

import logging

from pydantic import Field
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, TargetInfo
from specdec.sdk.model_proposer import AutoregressiveProposer, DraftInputs, ModelOptions, draft_kv_of, rows_of_tree

from .checkpoint import MtpSpec
from .layouts import Recycled
from .network import MtpModule
from .tensors import open_weights

logger = logging.getLogger(__name__)


class MtpOptions(ModelOptions):
    """Options of the mtp proposer."""

    recycled_hidden: Recycled | None = Field(
        None, description="what later steps read: the module's output after its final norm, or before; None: as trained"
    )


class MtpProposer(AutoregressiveProposer):
    """Multi-token prediction (arXiv 2412.19437): the target's next-token layer, run K times in a row.

    Without `model` the module is the one in the target's own checkpoint. Row i of its draft KV holds the token after
    position i with the target's final hidden state at i. Where a checkpoint brings several modules, one per further
    token, the first drafts every token, and a log entry says so: each further one would need draft KV of its own, made
    of what the one before it gives for every position.
    """

    ROWS_ARE_SHIFTED = True
    Options = MtpOptions

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's final hidden states, and draft KV of one layer.

        Raises Refusal if the target has no such module or it does not fit; CheckpointError: SD-E105, SD-E146, SD-E175.
        """
        spec = MtpSpec.read(config, target)
        kv = draft_kv_of(
            spec.decoder,
            num_layers=1,
            rows_per_pass=max(rows_of_tree(config), 1),
            dtype=config.dtype,
            depends_on_next_token=True,
        )
        return Needs(**cls.shared_needs(config, target), hidden_states=("final",), draft_kv=kv)

    @classmethod
    def default_draft_tokens(cls, model: str | None) -> int:
        """One: what a single module was trained for."""
        return super().default_draft_tokens(model) or 1

    def build(self) -> None:
        """Load the module and tie it to the target. Raises CheckpointError: SD-E172, SD-E174, SD-E175; Refusal."""
        spec = MtpSpec.read(self.config, self.target)
        if spec.num_modules > 1:
            said = "%s holds %d multi-token-prediction modules; the first drafts every token"
            logger.warning(said, spec.checkpoint.directory, spec.num_modules)
        self.network = MtpModule(spec, self.services.build_decoder(spec.decoder, self.settings))
        weights = open_weights(spec, self.services, self.network.state_dict().keys())
        weights.fill(self.network)
        embedding = self.embedding(weights, spec.hidden_size)
        scale = spec.checkpoint.logit_scale
        head = self.head(weights, spec.hidden_size, self.target.vocab_size, logit_scale=scale)
        weights.finish()
        self.network.attach(embedding, head)
        self.services.finish(self.network, self.settings)

    def first(self, inputs: DraftInputs) -> Tensor:
        """Run the committed rows on the target's hidden states."""
        assert inputs.hidden is not None, "declared"
        return self._run(inputs, inputs.hidden)

    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """Run one drafted token per request on what the module gave before it."""
        return self._run(inputs, states)

    def logits(self, states: Tensor) -> Tensor:
        """The head's logits of recycled states."""
        return self.network.logits(states)

    def _run(self, inputs: DraftInputs, hidden: Tensor) -> Tensor:
        block = self.network(inputs.token_ids, inputs.positions, hidden, inputs.attention)
        return self.network.recycled(block[inputs.last])
