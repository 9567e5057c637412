"""DFlash2 (z-lab): of each slot's best candidates, the one that follows the token before it best.

Letters: b requests, n drafts, k candidates of a slot, h width of the network, r rank, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer import Drawing

from .checkpoint import DFlashSpec
from .fields import required
from .walk import Block, Walk, among


class CandidateSelector(nn.Module):
    """How well a token follows another, in the light of the slot's output."""

    def __init__(self, spec: DFlashSpec, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(spec.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(spec.vocab_size, rank))
        self.hidden_projection = nn.Linear(spec.width, rank, bias=False)

    def forward(self, tokens: Tensor, projected: Tensor, successors: Tensor) -> Tensor:
        """Scores [b, k] of candidates with codes [b, k, r] after tokens [b], from the slot's `hidden_projection`."""
        state = self.predecessor_codebook[tokens] * projected
        return (successors @ state[:, :, None])[:, :, 0]


class SelectorWalk(Walk):
    """Draws from left to right among the k most likely tokens of each slot. Other tokens have no probability in q."""

    def __init__(self, checkpoint: Checkpoint, spec: DFlashSpec) -> None:
        """Raises CheckpointError SD-E170; Refusal for a draft vocabulary of its own."""
        super().__init__()
        spec.refuse_own_vocabulary()
        self._num_candidates = required(checkpoint, "selector_top_k", int)
        self.candidate_selector = CandidateSelector(spec, required(checkpoint, "selector_rank", int))

    def draw(self, drawing: Drawing, block: Block) -> None:
        """Draw the block from left to right."""
        scores, ids = block.logits.float().topk(self._num_candidates)
        projected = self.candidate_selector.hidden_projection(block.drafting)
        successors = self.candidate_selector.successor_codebook[ids]
        token = block.anchors
        for index in range(block.num_tokens):
            bonus = self.candidate_selector(token, projected[:, index], successors[:, index])
            token = drawing.draw(among(ids[:, index], scores[:, index] + bonus, block.logits.shape[-1]))
