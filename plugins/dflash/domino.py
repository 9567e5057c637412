"""Domino (Huang et al.): a recurrent network over the drafted tokens corrects the logits of later slots.

Letters: b requests, h width of the network, G width of the state, e width of the correction, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer import Drawing

from .checkpoint import DFlashSpec
from .fields import required
from .walk import Block, Walk


class DominoWalk(Walk):
    """The first tokens from their slots alone, the others with a correction from all tokens before them."""

    def __init__(self, checkpoint: Checkpoint, spec: DFlashSpec) -> None:
        """Raises CheckpointError SD-E170; Refusal for a draft vocabulary of its own."""
        super().__init__()
        spec.refuse_own_vocabulary()
        self._num_pure = required(checkpoint, "pure_draft_prefix_len", int)
        state_width, inner = required(checkpoint, "gru_hidden_dim", int), required(checkpoint, "emb_dim", int)
        self.prefix_gru = nn.GRU(spec.width, state_width, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(spec.width + state_width, inner, bias=False),
            nn.SiLU(),
            nn.Linear(inner, spec.vocab_size, bias=False),
        )

    def draw(self, drawing: Drawing, block: Block) -> None:
        """Draw the block from left to right."""
        weights = tuple(self.prefix_gru.parameters())  # of embeddings, and of states
        embedded = block.embed(block.anchors)
        state = embedded.new_zeros(len(embedded), self.prefix_gru.hidden_size)  # [b, G], before any token
        for index, output in enumerate(block.drafting.unbind(dim=1)):
            state = torch.gru_cell(embedded, state, *weights)
            logits = block.logits[:, index]
            if index >= self._num_pure:
                logits = logits + self.embed_proj(torch.cat([output, state], dim=-1))
            embedded = block.embed(drawing.draw(logits))
