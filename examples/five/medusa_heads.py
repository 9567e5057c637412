"""Medusa heads (arXiv 2401.10774): head i guesses the token i places after the newest, from one hidden state."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from specdec.sdk import Needs, ProposerConfig, StepView, TargetInfo
from specdec.sdk.model_proposer import DraftVocabulary, ParallelProposer


class MedusaHeads(ParallelProposer):
    """Drafts a token for each head, over a part of the vocabulary."""

    default_model = "tiny/medusa"

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The hidden state that gave the newest token."""
        checkpoint = cls.open_checkpoint(config)
        vocabulary = DraftVocabulary.from_ids(checkpoint.tensor("token_map"), target.vocab_size)
        most = checkpoint.get("num_heads", int)
        return cls.shared_needs(config, target, vocabulary=vocabulary, hidden_states=("final",), max_draft_tokens=most)

    def build(self) -> None:
        """A residual layer and an output for each of K heads."""
        weights, width, heads = self.load_weights(), self.target.hidden_size, range(self.config.num_draft_tokens)
        self.vocabulary = DraftVocabulary.from_ids(weights.take("token_map", -1), self.target.vocab_size)
        layers = torch.stack([weights.take(f"blocks.{i}.layers.0.weight", width, width) for i in heads])
        outputs = torch.stack([weights.take(f"lm_heads.{i}.weight", -1, width) for i in heads])
        self.network = nn.ParameterDict({"layers": layers, "outputs": outputs})  # [n, H, H], [n, D, H]
        self.services.finish(self.network, self.settings)

    def block_inputs(self, step: StepView) -> tuple[Tensor, ...]:
        """The last hidden state of each request."""
        return (step.kept.hidden_cat(step.kept.last),)

    def block_logits(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        """Logits [b, n, D] of the first n heads."""
        layers, outputs = (self.network[name][:num_tokens] for name in ("layers", "outputs"))
        final = inputs[0].to(layers.dtype)[:, None]
        states = final + silu(torch.einsum("bxh,nkh->bnk", final, layers))
        return torch.einsum("bnk,ndk->bnd", states, outputs)
