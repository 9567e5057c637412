"""DSpark (DeepSeek, DeepSpec): each slot's logits get a bias of low rank from the token before it.

Letters: b requests, h width of the network, r rank, V target vocabulary, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.sdk.checkpoint import Checkpoint, unusable
from specdec.sdk.model_proposer import Drawing

from .checkpoint import DFlashSpec
from .fields import anywhere, required
from .walk import Block, Walk


class MarkovHead(nn.Module):
    """The bias [b, D] that a token gives to the logits after it: "vanilla"."""

    def __init__(self, rank: int, spec: DFlashSpec) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size, bias=False)

    def start(self, embedded: Tensor, outputs: Tensor) -> Tensor:
        """The state [b, r] before the first slot that drafts.

        embedded: `markov_w1` of the anchors, [b, r].
        outputs: of the slots before, [b, 0 or 1, h].
        """
        return torch.zeros_like(embedded)

    def forward(self, embedded: Tensor, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The bias, and the state for the next slot.

        embedded: `markov_w1` of the token before the slot, [b, r].
        output: the slot's, [b, h].
        """
        return self.markov_w2(embedded), state


class GatedMarkovHead(MarkovHead):
    """The slot's output says how much of the token's embedding counts: "gated"."""

    def __init__(self, rank: int, spec: DFlashSpec) -> None:
        super().__init__(rank, spec)
        self.gate_proj = nn.Linear(spec.width + rank, rank)

    def forward(self, embedded: Tensor, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate = self.gate_proj(torch.cat([output, embedded], dim=-1)).sigmoid()
        return self.markov_w2(gate * embedded), state


class RecurrentMarkovHead(MarkovHead):
    """A state of width r remembers the slots before: "rnn"."""

    def __init__(self, rank: int, spec: DFlashSpec) -> None:
        super().__init__(rank, spec)
        self.joint_proj = nn.Linear(2 * rank + spec.width, 3 * rank)

    def start(self, embedded: Tensor, outputs: Tensor) -> Tensor:
        """Training runs over the whole block: the state has seen the anchor's slot, whether or not that slot drafts."""
        state = torch.zeros_like(embedded)
        for output in outputs.unbind(dim=1):
            _, state = self(embedded, output, state)
        return state

    def forward(self, embedded: Tensor, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        update, candidate, out = self.joint_proj(torch.cat([state, embedded, output], dim=-1)).chunk(3, dim=-1)
        update = update.sigmoid()
        return self.markov_w2(out.tanh()), update * state + (1 - update) * candidate.tanh()


HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}


class MarkovWalk(Walk):
    """Draws from left to right. The token before a slot biases its logits."""

    def __init__(self, checkpoint: Checkpoint, spec: DFlashSpec) -> None:
        """Raises CheckpointError SD-E170, SD-E171 for what the configuration says of the heads."""
        super().__init__()
        rank, kind = (
            required(checkpoint, "markov_rank", int),
            anywhere(checkpoint, "markov_head_type", str) or "vanilla",
        )
        if rank and kind.lower() not in HEADS:
            raise unusable(checkpoint, "markov_head_type", ", ".join(HEADS), kind.lower())
        self.markov_head = HEADS[kind.lower()](rank, spec) if rank else None

    def draw(self, drawing: Drawing, block: Block) -> None:
        """Draw the block from left to right."""
        head, token, state = self.markov_head, block.anchors, None
        for index, output in enumerate(block.drafting.unbind(dim=1)):
            logits = block.logits[:, index]
            if head is not None:
                embedded = head.markov_w1(token)
                state = head.start(embedded, block.outputs[:, : block.first_slot]) if state is None else state
                bias, state = head(embedded, output, state)
                logits = logits + bias
            token = drawing.draw(logits)
