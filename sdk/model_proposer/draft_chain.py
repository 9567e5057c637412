"""Drafts whose tokens are drawn one after the other, captured as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..services import Services
from ..types import Draft
from .sampling import DraftSampler

DrawTokens = Callable[..., tuple[Tensor, ...]]
"""`draw(rule, num_tokens, *inputs, *numbers)`: the result of `rule.drawing(numbers, num_tokens)`. See `DraftChain`."""


class DraftChain:
    """Makes drafts with a function that draws a token, runs a network on it, and draws the next one.

    The function is `draw(rule, num_tokens, *inputs, *numbers)`. It takes `rule.drawing(numbers, num_tokens)`, calls
    `draw` on it for each token, and returns its `result()`. It has to be a function of tensors that keeps no state,
    because a device captures it, once for each number of tokens and form of distribution (`Services.capture`). Where
    grammars are followed, it runs as it is.
    """

    def __init__(self, services: Services, draw: DrawTokens) -> None:
        self._services, self._draw = services, draw
        self._captured: dict[tuple[str, int], DrawTokens] = {}

    def draft(self, sampler: DraftSampler, num_tokens: int, *inputs: Tensor) -> Draft:
        """A draft of at most so many tokens for the rows of the sampler.

        inputs: what the function takes, tensors [b, ...] with one entry for each of these rows.
        """
        if sampler.rule.masks is not None:
            return sampler.draft_of(*self._draw(sampler.rule, num_tokens, *inputs, *sampler.numbers(num_tokens)))
        key = sampler.rule.form, num_tokens
        if key not in self._captured:
            self._captured[key] = self._services.capture(partial(self._draw, sampler.rule, num_tokens))
        return sampler.draft_of(*self._captured[key](*inputs, *sampler.numbers(num_tokens)))
