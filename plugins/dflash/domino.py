"""Domino (Huang et al.): a recurrent network over the drafted tokens corrects the logits of later slots.

Letters: b requests, h width of the network, G width of the state, e width of the correction, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer import Drawing

from .checkpoint import DFlashSpec
from .fields import required
from .walk import Block, Walk


class PrefixGru(nn.Module):
    """One layer of a GRU without biases, token by token. The kernel of torch's own cell is not on every device."""

    def __init__(self, width: int, state_width: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state_width, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state_width, state_width))

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:
        """The state [b, G] after an embedding [b, h]."""
        of_input = (embedded @ self.weight_ih_l0.T).chunk(3, dim=-1)
        of_state = (state @ self.weight_hh_l0.T).chunk(3, dim=-1)
        reset, update = ((a + b).sigmoid() for a, b in zip(of_input[:2], of_state[:2], strict=True))
        return (1 - update) * (of_input[2] + reset * of_state[2]).tanh() + update * state


class DominoWalk(Walk):
    """The first tokens from their slots alone, the others with a correction from all tokens before them."""

    def __init__(self, checkpoint: Checkpoint, spec: DFlashSpec) -> None:
        """Raises CheckpointError SD-E170; Refusal for a draft vocabulary of its own."""
        super().__init__()
        spec.refuse_own_vocabulary()
        self._num_pure = required(checkpoint, "pure_draft_prefix_len", int)
        state_width, inner = required(checkpoint, "gru_hidden_dim", int), required(checkpoint, "emb_dim", int)
        self.prefix_gru = PrefixGru(spec.width, state_width)
        self.embed_proj = nn.Sequential(
            nn.Linear(spec.width + state_width, inner, bias=False),
            nn.SiLU(),
            nn.Linear(inner, spec.vocab_size, bias=False),
        )

    def draw(self, drawing: Drawing, block: Block) -> None:
        """Draw the block from left to right."""
        embedded = block.embed(block.anchors)
        state = embedded.new_zeros(len(embedded), self.prefix_gru.weight_hh_l0.shape[1])  # [b, G], before any token
        for index, output in enumerate(block.drafting.unbind(dim=1)):
            state = self.prefix_gru(embedded, state)
            logits = block.logits[:, index]
            if index >= self._num_pure:
                logits = logits + self.embed_proj(torch.cat([output, state], dim=-1))
            embedded = block.embed(drawing.draw(logits))
