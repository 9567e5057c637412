"""Drafts whose tokens are drawn one after the other, captured as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..types import Draft, StepView
from .base import ModelProposer
from .sampling import DrawRule

Inputs = Callable[[StepView, Tensor | None], Sequence[Tensor]]
"""(step, the places in it that want drafts or None for all): tensors with a row for each of these requests."""
DrawTokens = Callable[..., tuple[Tensor, ...]]
"""`draw(rule, num_tokens, *inputs, *numbers)`: the result of `rule.drawing(numbers, num_tokens)`. See `DraftChain`."""


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
