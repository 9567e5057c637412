"""An EAGLE-3 head (arXiv 2503.01840): one layer with KV of its own, over three of the target's hidden states."""

from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk import Needs, ProposerConfig, TargetInfo
from specdec.sdk.model_proposer import AutoregressiveProposer, DraftInputs, DraftVocabulary


class Head(nn.Module):
    """A llama layer whose attention reads the token beside the state. Its parts have the checkpoint's names."""

    def __init__(self, decoder: Any, width: int) -> None:
        super().__init__()
        self.layers, self.norm, self.rotary = decoder.layers, decoder.norm, decoder.rotary_emb
        self.fc = nn.Linear(3 * width, width, bias=False)
        layer = self.layers[0]
        layer.hidden_norm = nn.RMSNorm(width, eps=1e-6)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * width, size, bias=False))

    def forward(self, embedded: Tensor, states: Tensor, inputs: DraftInputs) -> Tensor:
        """New states [M, H] of tokens [M, H] after states [M, H]."""
        layer, states = self.layers[0], self.layers[0].hidden_norm(states)
        pair = torch.cat([layer.input_layernorm(embedded), states], dim=-1)[None]
        rotary = self.rotary(pair, inputs.positions[None])
        states = states + layer.self_attn(pair, rotary, None, **inputs.attention)[0][0]
        return states + layer.mlp(layer.post_attention_layernorm(states))


class Eagle3Head(AutoregressiveProposer):
    """Drafts token by token, on its own states where the target's are not known yet."""

    default_model = "tiny/eagle3"
    INPUTS_ARE_SHIFTED = True

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The hidden states that the checkpoint names, and KV of its layer."""
        checkpoint = cls.open_checkpoint(config)
        states = tuple(checkpoint.get("eagle_aux_hidden_state_layer_ids", list))
        kv = cls.draft_kv(config, checkpoint.get("transformer_layer_config", dict))
        vocabulary = DraftVocabulary.from_offsets(checkpoint.tensor("d2t"), target.vocab_size)
        return cls.shared_needs(config, target, kv, vocabulary=vocabulary, hidden_states=states)

    def build(self) -> None:
        """The head, with an output of its own. The embedding is the target's."""
        checkpoint, weights, width = self.open_checkpoint(self.config), self.load_weights(), self.target.hidden_size
        decoder = self.services.build_decoder(checkpoint.get("transformer_layer_config", dict), self.settings)
        self.network = Head(decoder, width)
        weights.fill(self.network)
        self.vocabulary = DraftVocabulary.from_offsets(weights.take("d2t", -1), self.target.vocab_size)
        self.output = self.network.output = self.load_head(weights, width, checkpoint.get("draft_vocab_size", int))
        self.services.finish(self.network, self.settings)

    def first(self, inputs: DraftInputs) -> Tensor:
        """Committed tokens, after the target's states."""
        assert inputs.hidden is not None, "declared"
        return self.advance(inputs, self.network.fc(inputs.hidden.to(self.network.fc.weight.dtype)))

    def advance(self, inputs: DraftInputs, states: Tensor) -> Tensor:
        """Tokens after states: here a drafted one after our own."""
        return self.network(self.services.embed(inputs.token_ids).to(states.dtype), states, inputs)[inputs.last]

    def logits(self, states: Tensor) -> Tensor:
        """Over the draft vocabulary."""
        return self.output(self.network.norm(states))
