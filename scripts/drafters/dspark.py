"""DSpark (DeepSpec) in the `speculators` format: DFlash with tokens that depend on each other, and a confidence.

Slot j drafts the token behind it, from the anchor's own slot on. The token before that one gives the slot's logits a
bias of low rank: the Markov head. The confidence is the share of the target's distribution that the draft covers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import dflash
from .layers import Dims
from .speculators import proposal

DIMS = Dims(ffn=256)
NUM_LAYERS = 1
BLOCK_SIZE = 7
MARKOV_RANK = 16


class MarkovHead(nn.Module):
    """The bias [..., V] that a token [...] gives to the logits after it; none before training."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, MARKOV_RANK)
        self.markov_w2 = nn.Linear(MARKOV_RANK, vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIMS.hidden + MARKOV_RANK, 1)


class DSpark(dflash.DFlash):
    """Embedding and language-model head are the target's, read but not saved."""

    def __init__(self, embedding: Tensor, unembedding: Tensor, mask_token_id: int) -> None:
        sizes: dict[str, Any] = {"dims": DIMS, "num_layers": NUM_LAYERS, "block_size": BLOCK_SIZE}
        super().__init__(embedding, unembedding, mask_token_id, **sizes)
        self.markov_head = MarkovHead(len(embedding))
        self.confidence_head = ConfidenceHead()

    def guess(self, outputs: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., V] and the logit of the confidence [...] of slots `outputs` [..., h].

        `before` [...]: the token before the one that the slot drafts. Training of the confidence changes no draft.
        """
        embedded = self.markov_head.markov_w1(before)
        read = torch.cat([outputs, embedded], dim=-1).detach()
        return self.logits(outputs) + self.markov_head.markov_w2(embedded), self.confidence_head.proj(read)[..., 0]

    @torch.no_grad()
    def draft(self, features: Tensor, bonus: Tensor) -> Tensor:
        """Greedy drafts [B, BLOCK_SIZE] after `bonus` [B], given features [B, n, *] of positions before it."""
        outputs = self.outputs(features, bonus[:, None], torch.tensor([features.shape[1]]))[:, 0]
        tokens = [bonus]
        for output in outputs.unbind(1):
            tokens.append(self.guess(output, tokens[-1])[0].argmax(-1))
        return torch.stack(tokens[1:], dim=1)


def config(vocab_size: int, mask_token_id: int) -> dict[str, Any]:
    stated = dflash.config(vocab_size, mask_token_id)
    layers = {"intermediate_size": DIMS.ffn, "num_hidden_layers": NUM_LAYERS, "layer_types": ["full_attention"]}
    return stated | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "block_size": BLOCK_SIZE,
        "sample_from_anchor": True,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "speculators_config": proposal("dspark", BLOCK_SIZE),
        "transformer_layer_config": stated["transformer_layer_config"] | layers,
    }
