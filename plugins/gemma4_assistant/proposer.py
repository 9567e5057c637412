"""Drafting with a Gemma 4 assistant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, StepView, TargetInfo
from specdec.sdk.extensions import TargetKV
from specdec.sdk.model_proposer import CachedTargetProposer, ModelOptions

from .checkpoint import AssistantSpec
from .network import Assistant


class Gemma4AssistantOptions(ModelOptions):
    """Options of the gemma4_assistant proposer."""

    rotary_position: Literal["last", "newest"] = Field(
        default="last",
        description="where the queries of a round stand: at the last position that the target computed, as in vLLM and "
        "SGLang, or at the newest token, as in transformers",
    )


class Gemma4AssistantProposer(CachedTargetProposer):
    """An assistant that Google publishes for Gemma 4 (transformers' `gemma4_assistant`, `gemma4_unified_assistant`).

    Each pass reads the embedding of a token and a state. The first state is the target's final one, and further states
    are the assistant's own. Its layers attend to the keys and values of the target's last layer of their kind. It sees
    committed positions only, and all passes of a round stand at one position.
    """

    Options = Gemma4AssistantOptions

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's final hidden states, and the keys and values of one layer of each kind.

        Raises Refusal if the assistant is for another target; CheckpointError: SD-E105, SD-E170, SD-E171, SD-E175.
        """
        spec = AssistantSpec.read(cls.open_checkpoint(config), target)
        read = TargetKV(layers=tuple(sorted(set(spec.sources))))
        return cls.shared_needs(config, target, read, hidden_states=("final",))

    def build(self) -> None:
        """Load the assistant. Raises CheckpointError: SD-E146, SD-E172, SD-E174, SD-E175; Refusal."""
        spec = AssistantSpec.read(self.open_checkpoint(self.config), self.target)
        self._sources, self._kv = spec.sources, self.services.target_kv()
        self._ahead = 0 if self.config.options.rotary_position == "newest" else 1
        self.network = Assistant(spec, self.services.build_decoder(spec.decoder, self.settings))
        weights = self.load_weights()
        if "lm_head.weight" in weights:
            weights.drop("model.embed_tokens.weight")  # the same, stored twice
        weights.rename("model.embed_tokens.", "lm_head.")
        weights.rename("masked_embedding.", "lm_head.")
        weights.fill(self.network)
        weights.finish()
        self.services.finish(self.network, self.settings)

    def first_states(self, step: StepView) -> Sequence[Tensor]:
        """The target's final hidden state at each request's last kept token."""
        return (step.kept.hidden_cat(step.kept.last),)

    def advance(
        self, index: int, slots: Tensor, lengths: Tensor, token_ids: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one pass over the target's keys and values."""
        attention = self._kv.attention(slots, lengths, self._sources)
        (hidden,) = states
        logits, state = self.network(self.services.embed(token_ids), hidden, lengths - self._ahead, attention)
        return logits, state
