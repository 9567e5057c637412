"""Drafting all tokens of a step in one pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..services import Services
from ..types import Draft, StepView, TargetInfo
from .base import ModelOptions, ModelProposer
from .sampling import most_likely


class ParallelOptions(ModelOptions):
    """Options of proposers that draft all tokens in one pass."""

    parallel_drafting: Literal[True] | None = Field(None, description="always on; for configurations written for vLLM")


class ParallelProposer(ModelProposer):
    """The network gives the logits of all draft positions at once. The tokens are drawn independently."""

    Options: type[ModelOptions] = ParallelOptions

    @abstractmethod
    def block_inputs(self, step: StepView) -> Sequence[Tensor]:
        """The inputs of `block_logits` for a step: tensors [B, ...] with one row per request."""

    @abstractmethod
    def block_logits(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        """Logits [b, num_tokens, D] of the first draft tokens. It may be recorded on a device (see `Services.capture`).

        num_tokens: the number of draft tokens.
        inputs: the tensors of `block_inputs`, for some of the requests.
        """

    def bind(self, target: TargetInfo, services: Services) -> None:
        """See `ModelProposer.bind`."""
        super().bind(target, services)
        self._captured: dict[tuple[bool, int], Callable[..., Tensor]] = {}

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        chosen = self.wanted(step)
        num_tokens = self.most_wanted(step)
        sampler = self.sampler(step, chosen)
        if num_tokens == 0:
            return sampler.draft()
        inputs = self.block_inputs(step)
        if chosen is not None:
            inputs = [each[chosen] for each in inputs]
        block = self._pass(num_tokens, greedy=sampler.is_greedy)(*inputs)
        if sampler.is_greedy:
            return sampler.draft_of(block)
        for logits in block.unbind(dim=1):
            sampler.draw(logits)
        return sampler.draft()

    def _pass(self, num_tokens: int, *, greedy: bool) -> Callable[..., Tensor]:
        """The pass for so many tokens: their logits, or the most likely ones' ids."""
        if (greedy, num_tokens) not in self._captured:
            function = self._block_ids if greedy else self.block_logits
            self._captured[greedy, num_tokens] = self.services.capture(partial(function, num_tokens))
        return self._captured[greedy, num_tokens]

    def _block_ids(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        return most_likely(self.block_logits(num_tokens, *inputs), self.vocabulary)
