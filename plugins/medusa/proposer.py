"""Drafting with heads that look one to k places past the newest token, all at once."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, StepView, TargetInfo
from specdec.sdk.errors import CheckpointError
from specdec.sdk.model_proposer import DraftVocabulary, ParallelOptions, ParallelProposer, Weights

from .checkpoint import TOKEN_MAP, MedusaSpec
from .choices import choices_of
from .network import MedusaHeads


class MedusaOptions(ParallelOptions):
    """Options of the medusa proposer."""

    medusa_choices: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = Field(
        default=None,
        min_length=1,
        description="the tree that max_nodes drafts, as paths of ranks, the best first: [[0], [0, 0], [1]]. "
        "`specdec search-tree` finds it. None: the checkpoint's, else each step's most likely paths",
    )


class MedusaProposer(ParallelProposer):
    """Medusa (arXiv 2401.10774): head i drafts the token i places after the newest.

    Drafts are the most likely chain. With `max_nodes` they are a static tree, where the checkpoint or the user
    says which (`medusa_choices`). Otherwise they are the most likely paths by the product of the heads' probabilities.

    Its only input is the target's final hidden state at the last position that was run, the one that gave the newest
    token. There is no draft KV and no state from step to step.
    """

    Options = MedusaOptions
    DRAFTS_TREES = True

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's final hidden states, and as many drafts as heads are stored.

        Raises Refusal if the heads do not fit the target; CheckpointError: SD-E146, SD-E171 .. SD-E173.
        """
        checkpoint = cls.open_checkpoint(config)
        spec = MedusaSpec.read(checkpoint, target)
        spec.check_fits(target)
        if config.max_nodes is not None:
            choices_of(config, checkpoint, spec.draft_vocab_size)
        needs = cls.shared_needs(config, target, hidden_states=("final",), max_draft_tokens=spec.num_heads)
        if "dense" in needs.distributions and spec.has_token_map:
            vocabulary = _vocabulary(checkpoint.tensor(spec.stored_as(TOKEN_MAP)), spec, target)
            return needs.replace(draft_vocabulary=tuple(vocabulary.target_ids.tolist()) if vocabulary else None)
        return needs

    def build(self) -> None:
        """Load as many heads as K. Raises CheckpointError: SD-E172 .. SD-E175."""
        checkpoint = self.open_checkpoint(self.config)
        spec = MedusaSpec.read(checkpoint, self.target)
        tensors = self.services.load_tensors(checkpoint.directory, tuple(spec.names))
        weights = Weights({spec.names[stored]: tensor for stored, tensor in tensors.items()}, checkpoint.directory)
        with self.services.device:
            self._choices = choices_of(self.config, checkpoint, spec.draft_vocab_size)
        num_heads = self.config.num_draft_tokens
        for unused in range(num_heads, spec.num_heads):
            weights.drop(f"blocks.{unused}.layers.*", f"lm_heads.{unused}.weight")
        with torch.device("meta"):  # no time for random weights
            heads = MedusaHeads(spec, num_heads)
        heads.to_empty(device=self.services.device)
        weights.fill(heads)
        if spec.has_token_map:
            self.vocabulary = _vocabulary(weights.take(TOKEN_MAP, -1), spec, self.target)
        if not spec.has_own_heads:
            scale = checkpoint.logit_scale
            heads.shared = self.load_head(weights, spec.hidden_size, spec.draft_vocab_size, logit_scale=scale)
        weights.finish()
        self.services.finish(heads, self.settings)
        self.network, self._dtype = heads, next(heads.parameters()).dtype

    def block_inputs(self, step: StepView) -> tuple[Tensor, ...]:
        """The final hidden state of every request's last kept token."""
        return (step.kept.hidden_cat(step.kept.last),)

    def block_logits(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        """Run one pass over one row per request."""
        (final,) = inputs
        logits: Tensor = self.network(final.to(self._dtype), num_tokens)
        return logits

    def greedy_tree(self, logits: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
        """The static tree, where there is one. It says nothing of confidence: its order is that of acceptance."""
        if self._choices is None:
            return super().greedy_tree(logits, num_nodes)
        return self._choices.tree(logits, num_nodes, self.vocabulary)


def _vocabulary(token_map: Tensor, spec: MedusaSpec, target: TargetInfo) -> DraftVocabulary | None:
    """Which token each output is. Raises CheckpointError SD-E173 if the map does not fit the heads or the target."""
    if token_map.shape != (spec.draft_vocab_size,):
        facts = {"expected": f"{TOKEN_MAP} [{spec.draft_vocab_size}]", "found": f"{list(token_map.shape)}"}
        raise CheckpointError("SD-E173", "the draft checkpoint's vocabulary map does not fit its heads", facts)
    return DraftVocabulary.from_ids(token_map, target.vocab_size)
