"""Drafting all tokens of a step in one pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..services import Services
from ..types import Draft, StepView, TargetInfo
from .base import ModelOptions, ModelProposer
from .drafts import DraftChain, DraftTrees, Nodes
from .greedy_tree import Candidates, tree_of_positions
from .sampling import Drawing, DrawRule, of_chosen


class ParallelOptions(ModelOptions):
    """Options of proposers that draft all tokens in one pass."""

    parallel_drafting: Literal[True] | None = Field(
        default=None, description="always on; for configurations written for vLLM"
    )


class ParallelProposer(ModelProposer):
    """The network gives the logits of all draft positions at once. The tokens are drawn independently.

    A proposer whose tokens depend on those before them in the block overrides `draw_block`.
    """

    Options: type[ModelOptions] = ParallelOptions

    @abstractmethod
    def block_inputs(self, step: StepView) -> Sequence[Tensor]:
        """The inputs of `block_logits` for a step: tensors [B, ...] with one row per request."""

    @abstractmethod
    def block_logits(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        """Logits [b, num_tokens, D] of the first draft tokens. It may be captured on a device (see `Services.capture`).

        num_tokens: the number of draft tokens.
        inputs: the tensors of `block_inputs`, for some of the requests.
        """

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Bind as `ModelProposer` does, and prepare the captured blocks."""
        super().bind(target, services)
        self._blocks = DraftChain(self, self._inputs_of, self._drawn_block)
        self._trees_of_blocks = DraftTrees(self, self._inputs_of, self._grow_from_block)

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        if self.config.max_nodes is not None:
            return self._trees_of_blocks.draft(step)
        return self._blocks.draft(step)

    def _inputs_of(self, step: StepView, chosen: Tensor | None) -> Sequence[Tensor]:
        return [of_chosen(each, chosen) for each in self.block_inputs(step)]

    def _grow_from_block(self, found: Nodes, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Trees where each depth has a distribution of its own, whatever its parent."""
        logits = self.block_logits(found.depth, *inputs)
        if isinstance(found, Candidates):
            return self.greedy_tree(logits, found.num_nodes)
        level = None
        for each in logits.unbind(dim=1):
            found.add(each[:, None].expand(-1, 1 if level is None else level.nodes.shape[1], -1), level)
            level = found.next_level()
        return found.result()

    def greedy_tree(self, logits: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
        """The trees of requests that draw nothing: target ids and parents [b, n]. The most likely paths.

        A device may capture this (see `Services.capture`).

        logits: [b, depth, D]. num_nodes: the most that a request wants; others are cut.
        """
        return tree_of_positions(logits, num_nodes, self.vocabulary)

    def _drawn_block(self, rule: DrawRule, num_tokens: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tokens of a block and what they were drawn from, from its inputs and then the numbers of the rule."""
        inputs, numbers = (tensors, ()) if rule.form == "one_hot" else (tensors[:-1], tensors[-1:])
        drawing = rule.drawing(numbers, num_tokens)
        self.draw_block(drawing, num_tokens, *inputs)
        return drawing.result()

    def draw_block(self, drawing: Drawing, num_tokens: int, *inputs: Tensor) -> None:
        """Draw the tokens of a block from left to right. It may be captured on a device (see `Services.capture`).

        drawing: draws each token from its logits, and gives it as a target id.
        num_tokens: the number of draft tokens.
        inputs: the tensors of `block_inputs`, for some of the requests.
        """
        drawing.draw_each(self.block_logits(num_tokens, *inputs))
