"""Drafting all tokens of a step in one pass."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ..types import Draft, StepView
from .base import ModelProposer


class ParallelProposer(ModelProposer):
    """The network gives the logits of every draft position at once; the tokens are drawn independently."""

    @abstractmethod
    def block_logits(self, step: StepView, chosen: Tensor | None, num_tokens: int) -> Tensor:
        """Logits [b, num_tokens, D] of the first draft tokens of the `chosen` places in the step (None: all)."""

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        chosen = self.wanted(step)
        num_tokens = self.most_wanted(step)
        sampler = self.sampler(step, chosen)
        if num_tokens == 0:
            return sampler.draft()
        for logits in self.block_logits(step, chosen, num_tokens).unbind(dim=1):
            sampler.draw(logits)
        return sampler.draft()
