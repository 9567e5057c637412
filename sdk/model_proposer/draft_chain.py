"""Drafts whose tokens are drawn one after the other: recorded as a whole, or run for ever fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..services import Services
from ..types import Draft, StepView
from .sampling import DraftSampler
from .stopping import StoppingRule, shortened

DrawTokens = Callable[..., tuple[Tensor, ...]]
"""`draw(rule, num_tokens, *inputs, *numbers)`: the result of `rule.drawing(numbers, num_tokens)`. See `DraftChain`."""


class DraftChain:
    """Makes drafts with a function that draws a token, runs a network on it, and draws the next one.

    The function is `draw(rule, num_tokens, *inputs, *numbers)`. It takes `rule.drawing(numbers, num_tokens)`, calls
    `draw` on it for each token, and returns its `result()`. After each token `going_on` leaves the rows that draw once
    more; where none is left, the function ends. It has to be a function of tensors that keeps no state, because a
    device records it, once for each number of tokens and form of distribution (`Services.capture`).
    """

    def __init__(self, services: Services, draw: DrawTokens) -> None:
        self._services, self._draw = services, draw
        self._recorded: dict[tuple[str, int], DrawTokens] = {}

    def draft(self, step: StepView, sampler: DraftSampler, num_tokens: int, *inputs: Tensor) -> Draft:
        """A draft of at most so many tokens for the rows of the sampler, which stop early where the step says so.

        inputs: what the function takes, tensors [b, ...] with one entry for each of these rows.
        """
        rule, numbers = sampler.rule, sampler.numbers(num_tokens)
        if step.stop_rule is not None and rule.confident:
            stopping = StoppingRule(**vars(rule), stop=step.stop_rule)
            return shortened(sampler.draft_of(*self._draw(stopping, num_tokens, *inputs, *numbers)))
        key = rule.form, num_tokens
        if key not in self._recorded:
            self._recorded[key] = self._services.capture(partial(self._draw, rule, num_tokens))
        return sampler.draft_of(*self._recorded[key](*inputs, *numbers))
