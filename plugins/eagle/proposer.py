"""Drafting with an EAGLE head, one token after the other or, where it was trained to, all of them in one pass."""

from __future__ import annotations

import logging

from pydantic import Field
from torch import Tensor

from specdec.sdk import Needs, ProposerConfig, Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer import (
    DraftInputs,
    DraftVocabulary,
    MaskedOptions,
    MaskedProposer,
    Weights,
)
from specdec.sdk.model_proposer.autoregressive import HeadProposer

from .eagle3_spec import MASK_TENSOR, Convention, Eagle3Spec
from .eagle_spec import EagleSpec
from .names import UNUSED, our_names
from .network import Eagle3Network, EagleNetwork

logger = logging.getLogger("specdec")


class EagleProposer(HeadProposer):
    """EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858), drafting a chain.

    Row i of the draft KV holds the token after position i with the target's final hidden state at i.
    """

    DRAFTS_TREES = True

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's final hidden states, and draft KV of the head's layers.

        Raises Refusal if the checkpoint does not fit the target or is a relative; CheckpointError SD-E170 .. SD-E174.
        """
        spec = EagleSpec.read(cls.open_checkpoint(config), target)
        spec.check_fits(target)
        kv = cls.draft_kv(config, spec.decoder)
        return cls.shared_needs(config, target, kv, hidden_states=("final",))

    def build(self) -> None:
        """Load the head and tie it to the target. Raises CheckpointError: SD-E172, SD-E174, SD-E175; Refusal."""
        checkpoint = self.open_checkpoint(self.config)
        spec = EagleSpec.read(checkpoint, self.target)
        weights = _open_weights(checkpoint, self)
        self.network = EagleNetwork(spec, self.services.build_decoder(spec.decoder, self.settings))
        weights.fill(self.network)
        self.network.embedding = self.load_embedding(weights, spec.embedding_size)
        scale = checkpoint.logit_scale
        self.network.head = self.load_head(weights, spec.hidden_size, spec.vocab_size, logit_scale=scale)
        weights.finish()
        self.services.finish(self.network, self.settings)


class Eagle3Options(MaskedOptions):
    """Options of the eagle3 proposer."""

    aux_layer_convention: Convention = Field(
        default="auto", description="how the checkpoint numbers the target's layers; auto: by its publisher and its ids"
    )


class Eagle3Proposer(HeadProposer, MaskedProposer):
    """EAGLE-3 heads (arXiv 2503.01840), and P-EAGLE's, which draft in parallel (arXiv 2602.01469).

    Row i of the draft KV holds the token after position i with the target's hidden states at i.
    """

    DRAFTS_TREES = True
    Options = Eagle3Options

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The hidden states that the checkpoint names, and draft KV of the head's layers.

        Raises Refusal if the checkpoint does not fit the target or is a relative; CheckpointError SD-E170 .. SD-E175.
        """
        checkpoint = cls.open_checkpoint(config)
        spec = _read(checkpoint, config, target)
        spec.check_fits(target)
        states = spec.boundaries or ("final",)
        needs = cls.shared_needs(config, target, cls.draft_kv(config, spec.decoder), hidden_states=states)
        if "dense" in needs.distributions:
            return needs.replace(draft_vocabulary=_mapped_ids(checkpoint, spec, target))
        return needs

    def build(self) -> None:
        """Load the head and tie it to the target. Raises CheckpointError: SD-E172 .. SD-E175; Refusal."""
        checkpoint = self.open_checkpoint(self.config)
        spec = _read(checkpoint, self.config, self.target)
        self.mask_token_id = spec.mask_token_id
        weights = _open_weights(checkpoint, self)
        self.network = Eagle3Network(spec, self.services.build_decoder(spec.decoder, self.settings))
        weights.fill(self.network)
        if spec.draft_vocab_size != self.target.vocab_size or "d2t" in weights:
            d2t = weights.take("d2t", spec.draft_vocab_size)
            self.vocabulary = DraftVocabulary.from_offsets(d2t, self.target.vocab_size)
        self.network.embedding = self.load_embedding(weights, spec.embedding_size)
        width, scale = spec.decoder["hidden_size"], checkpoint.logit_scale
        self.network.head = self.load_head(weights, width, spec.draft_vocab_size, logit_scale=scale)
        weights.finish()
        self.services.finish(self.network, self.settings)
        logger.info("%s reads the target's hidden states at boundaries %s", checkpoint.directory, spec.boundaries)

    def first(self, inputs: DraftInputs) -> Tensor:
        """Run the committed rows on the target's hidden states."""
        assert inputs.hidden is not None, "declared"
        return self.run(inputs, self.network.fuse(inputs.hidden))

    def masked(self, inputs: DraftInputs) -> Tensor:
        """Run rows of the mask on the state that was learned for them."""
        return self.run(inputs, self.network.masked_states(len(inputs.positions)))


def _read(checkpoint: Checkpoint, config: ProposerConfig, target: TargetInfo) -> Eagle3Spec:
    """Raises Refusal if the options ask for a way of drafting that the head was not trained for."""
    spec = Eagle3Spec.read(checkpoint, target, config.options.aux_layer_convention)
    asked, parallel = config.options.parallel_drafting, spec.mask_token_id is not None
    if asked not in (None, parallel):
        found = "has a mask to draft in parallel with" if parallel else "has no mask_hidden to draft in parallel with"
        raise Refusal(f"parallel_drafting is {asked}, and the checkpoint {found}", f'"parallel_drafting": {parallel}')
    return spec


def _open_weights(checkpoint: Checkpoint, proposer: EagleProposer | Eagle3Proposer) -> Weights:
    tensors = our_names(proposer.services.load_tensors(checkpoint.directory))
    if MASK_TENSOR in tensors:  # vLLM takes it with and without leading axes
        tensors[MASK_TENSOR] = tensors[MASK_TENSOR].reshape(1, 1, -1)
    weights = Weights(tensors, checkpoint.directory)
    weights.drop(*UNUSED)
    return weights


def _mapped_ids(checkpoint: Checkpoint, spec: Eagle3Spec, target: TargetInfo) -> tuple[int, ...] | None:
    """The target id of each draft id, None if they are the same."""
    if spec.draft_vocab_size == target.vocab_size and "d2t" not in checkpoint.shapes:
        return None
    vocabulary = DraftVocabulary.from_offsets(checkpoint.tensor("d2t"), target.vocab_size)
    return None if vocabulary is None else tuple(vocabulary.target_ids.tolist())
