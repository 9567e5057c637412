"""How tokens are taken from the outputs of a block: the one place where the members of the family differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.sdk import StepView
from specdec.sdk.model_proposer import Drawing


@dataclass(frozen=True)
class Block:
    """What one pass over a block per request gave. Letters: b requests, W slots, n drafts, h width, D draft ids."""

    anchors: Tensor  # [b] int64, the newest tokens
    outputs: Tensor  # [b, W, h], of every slot, behind the final norm
    all_logits: Tensor  # [b, W or W-1, D], of the slots that can draft
    num_tokens: int  # n
    seen: tuple[Tensor, ...]  # what the walk took from the step
    embed: Callable[[Tensor], Tensor]  # embeddings [..., h] of target ids
    project: Callable[[Tensor], Tensor]  # context rows [b, h] of hidden states [b, A*H]

    @property
    def first_slot(self) -> int:
        """The slot that drafts the first token."""
        return self.outputs.shape[1] - self.all_logits.shape[1]

    @property
    def logits(self) -> Tensor:
        """The logits of the tokens to draw, [b, n, D]."""
        return self.all_logits[:, : self.num_tokens]

    @property
    def drafting(self) -> Tensor:
        """The outputs behind `logits`, [b, n, h]."""
        return self.outputs[:, self.first_slot :][:, : self.num_tokens]


class Walk(nn.Module):
    """Draws each slot's token from its own logits: plain DFlash.

    Others draw from left to right, and each token depends on those before it. A walk's parameters have the names of
    the checkpoint's tensors.
    """

    def sees(self, step: StepView) -> tuple[Tensor, ...]:
        """What it needs of a step beside the block: tensors [B, ...]."""
        return ()

    def draw(self, drawing: Drawing, block: Block) -> None:
        """Draw the n tokens of a block. It may be captured on a device (see `Services.capture`)."""
        drawing.draw_each(block.logits)


def among(ids: Tensor, scores: Tensor, num_ids: int) -> Tensor:
    """Logits [b, D] of candidates ids [b, k] with scores [b, k]; no other token can be drawn."""
    return scores.new_full((len(ids), num_ids), -torch.inf).scatter(1, ids, scores)
