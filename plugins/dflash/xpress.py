"""XPress (speculators): passes over the whole block, each of which corrects it from the tokens of the pass before.

Letters: b requests, W slots, B slots of the trained block, h width of the network, r rank, V target vocabulary, D draft
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from specdec.sdk import StepView
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer import Drawing

from .checkpoint import DFlashSpec
from .fields import anywhere, required
from .walk import Block, Walk


class Refiner(nn.Module):
    """The correction of each slot's logits from the tokens before it and the outputs of the block."""

    def __init__(self, spec: DFlashSpec, rank: int, mlp_ratio: int) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(spec.vocab_size, rank)
        self.down_h = nn.Linear(spec.width, rank, bias=False)
        self.down_g = nn.Linear(spec.width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, spec.block_size, spec.block_size))
        self.mlp_gate = nn.Linear(rank, mlp_ratio * rank, bias=False)
        self.mlp_up = nn.Linear(rank, mlp_ratio * rank, bias=False)
        self.mlp_down = nn.Linear(mlp_ratio * rank, rank, bias=False)
        self.readout = nn.Linear(rank, spec.draft_vocab_size, bias=False)

    def features(self, outputs: Tensor) -> Tensor:
        """What no pass changes, [b, W, 2r], from the outputs [b, W, h] of all slots."""
        mean = outputs.mean(dim=1, keepdim=True).expand_as(outputs)
        return torch.cat([self.down_h(outputs), self.down_g(mean)], dim=-1)

    def forward(self, features: Tensor, before: Tensor) -> Tensor:
        """Corrections [b, W, D]; `before` [b, W]: the token before each slot."""
        width = before.shape[1]
        states = self.in_proj(torch.cat([features, self.token_embed(before)], dim=-1))
        mixing = self.mix_l[:, :width, :width].tril()
        states = states + (mixing @ states.permute(0, 2, 1)[..., None])[..., 0].permute(0, 2, 1)
        states = states + self.mlp_down(silu(self.mlp_gate(states)) * self.mlp_up(states))
        corrections: Tensor = self.readout(states)
        return corrections


class XPressWalk(Walk):
    """The passes before the last take the most likely tokens; only the last one draws, each token by itself."""

    def __init__(self, checkpoint: Checkpoint, spec: DFlashSpec) -> None:
        """Raises CheckpointError SD-E170."""
        super().__init__()
        self._num_passes = required(checkpoint, "num_jacobi_passes", int)
        rank, ratio = required(checkpoint, "xpress_rank", int), anywhere(checkpoint, "xpress_mlp_ratio", int) or 2
        self.refiner_head = Refiner(spec, rank, ratio)

    def sees(self, step: StepView) -> tuple[Tensor, ...]:
        """The tokens before the anchors."""
        return (step.kept.token_ids[step.kept.last],)

    def draw(self, drawing: Drawing, block: Block) -> None:
        """Draw the block. Every slot is refined, whatever the number of tokens, because the mean is over all slots."""
        (before_anchor,) = block.seen
        known = [before_anchor, block.anchors] if block.first_slot else [block.anchors]
        features = self.refiner_head.features(block.outputs)
        logits = block.all_logits
        for _ in range(self._num_passes):
            guesses = drawing.most_likely(logits)[:, :-1]
            before = torch.cat([torch.stack(known, dim=1), guesses], dim=1)
            logits = block.all_logits + self.refiner_head(features, before)[:, block.first_slot :]
        drawing.draw_each(logits[:, : block.num_tokens])
