"""Drafts of one step, drawn by functions that are captured: chains token by token, trees level by level.

Of trees, those of greedy requests have the likeliest nodes, and those of sampled requests are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..types import Draft, StepView
from .base import ModelProposer
from .drawn_nodes import DrawnNodes, DrawnShape
from .greedy_tree import Candidates
from .sampling import DrawRule

Inputs = Callable[[StepView, Tensor | None], Sequence[Tensor]]
"""(step, the places in it that want drafts or None for all): tensors with a row for each of these requests."""
DrawTokens = Callable[..., tuple[Tensor, ...]]
"""`draw(rule, num_tokens, *inputs, *numbers)`: the result of `rule.drawing(numbers, num_tokens)`. See `DraftChain`."""
Nodes = Candidates | DrawnNodes
Grow = Callable[..., tuple[Tensor, ...]]
"""(nodes, what `Inputs` gave): what `DraftSampler.draft_of_trees` takes. It may be captured (`Services.capture`)."""


class DraftChain:
    """Makes drafts with a function that draws a token, runs a network on it, and draws the next one.

    The function is `draw(rule, num_tokens, *inputs, *numbers)`. It takes `rule.drawing(numbers, num_tokens)`, calls
    `draw` on it for each token, and returns its `result()`. It has to be a function of tensors that keeps no state,
    because a device captures it, once for each number of tokens and form of distribution (`Services.capture`). Where
    grammars are followed, it runs as it is.
    """

    def __init__(self, proposer: ModelProposer, inputs: Inputs, draw: DrawTokens) -> None:
        """inputs: what drawing starts from, tensors [b, ...]. draw: the function."""
        self._proposer, self._inputs, self._draw = proposer, inputs, draw
        self._captured: dict[tuple[str, int], DrawTokens] = {}

    def draft(self, step: StepView) -> Draft:
        """A draft for every request with a budget."""
        proposer = self._proposer
        chosen, num_tokens = proposer.wanted(step), proposer.most_wanted(step)
        sampler = proposer.sampler(step, chosen)
        if num_tokens == 0:
            return sampler.draft()
        draw = self._drawing(sampler.rule, num_tokens)
        return sampler.draft_of(*draw(*self._inputs(step, chosen), *sampler.numbers(num_tokens)))

    def _drawing(self, rule: DrawRule, num_tokens: int) -> DrawTokens:
        """Draws so many tokens, by a rule."""
        draw = partial(self._draw, rule, num_tokens)
        if rule.masks is not None:
            return draw
        key = rule.form, num_tokens
        if key not in self._captured:
            self._captured[key] = self._proposer.services.capture(draw)
        return self._captured[key]


class DraftTrees:
    """Drafts the trees of a proposer.

    Levels have as many nodes whatever was drawn, so that growing a tree is captured as a chain is: once for likeliest
    nodes, and once for drawn ones.
    """

    def __init__(self, proposer: ModelProposer, inputs: Inputs, grow: Grow) -> None:
        """inputs: what growing starts from. grow: grows the trees of one kind."""
        self._proposer, self._inputs, self._grow = proposer, inputs, grow
        self._captured: dict[tuple[str, int], Grow] = {}

    def draft(self, step: StepView) -> Draft:
        """A tree for every request with a budget.

        Greedy requests and sampled ones grow in different ways. So each kind is grown by itself, and no request's tree
        depends on the others. On a device the host does not know which is which: a step with a sampled request is
        drawn.
        """
        proposer = self._proposer
        if proposer.most_wanted(step) == 0:
            return proposer.sampler(step, None).draft()
        if step.sampling is None or step.sampling.all_greedy or step.budget.device.type != "cpu":
            return self._grown(step, proposer.wanted(step))
        assert step.sampling.temperature is not None, "a proposer that reports a distribution declares it"
        wanted, sampled = step.budget > 0, step.sampling.temperature > 0
        to_draw, others = (wanted & sampled).nonzero()[:, 0], (wanted & ~sampled).nonzero()[:, 0]
        if not len(others):
            return self._grown(step, to_draw)
        greedy = self._grown(replace(step, sampling=None), others)
        return _merged(greedy, self._grown(step, to_draw)) if len(to_draw) else greedy

    def _grown(self, step: StepView, chosen: Tensor | None) -> Draft:
        sampler, num_nodes = self._proposer.sampler(step, chosen), self._proposer.most_wanted(step)
        numbers = () if sampler.is_greedy else (sampler.budgets, *sampler.numbers(num_nodes))
        growing = self._growing(sampler.rule, num_nodes)
        return sampler.draft_of_trees(*growing(*self._inputs(step, chosen), *numbers))

    def _growing(self, rule: DrawRule, num_nodes: int) -> Grow:
        """Grows trees of so many nodes, by a rule."""
        key = rule.form, num_nodes
        if key not in self._captured:
            depth, services = self._proposer.config.num_draft_tokens, self._proposer.services
            form = partial(self._likeliest, rule, num_nodes, depth)
            if rule.form != "one_hot":
                form = partial(self._drawn, rule, DrawnShape.of(num_nodes, depth, services.device))
            self._captured[key] = services.capture(form)
        return self._captured[key]

    def _likeliest(self, rule: DrawRule, num_nodes: int, depth: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self._grow(Candidates(rule.vocabulary, num_nodes, depth), *inputs)

    def _drawn(self, rule: DrawRule, shape: DrawnShape, *tensors: Tensor) -> tuple[Tensor, ...]:
        *inputs, budgets, numbers = tensors
        return self._grow(DrawnNodes(rule, shape, budgets, numbers), *inputs)


def _merged(greedy: Draft, drawn: Draft) -> Draft:
    """Merge two drafts, of which each has no nodes in the rows of the other. Missing nodes are -1, the least id."""
    assert greedy.parents is not None, "both are trees"
    assert drawn.parents is not None, "both are trees"
    return replace(
        drawn,
        token_ids=torch.maximum(greedy.token_ids, drawn.token_ids),
        lengths=greedy.lengths + drawn.lengths,
        parents=torch.maximum(greedy.parents, drawn.parents),
    )
