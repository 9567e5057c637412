"""Laws that are not the law of the draw."""

from __future__ import annotations

import torch
from good_proposers import Waves, inverse_cdf


class TrimsUnluckyTokens(Waves):
    """Stops before a token whose own probability is low."""

    def lengths(self, step, token_ids, law):
        likely = law.softmax(-1).gather(2, token_ids[:, :, None])[:, :, 0] > 1.2 / self.vocab_size
        return torch.minimum(step.budget, likely.long().cumprod(1).sum(1))


class TrimsFromTheSecond(Waves):
    """The same, but for the first token: seen only where two requests draw the same first one."""

    def lengths(self, step, token_ids, law):
        likely = law.softmax(-1).gather(2, token_ids[:, :, None])[:, :, 0] > 1.2 / self.vocab_size
        likely[:, 0] = True
        return torch.minimum(step.budget, likely.long().cumprod(1).sum(1))


class SharpensAfterTheDraw(Waves):
    """Reports a little more for the token that it drew."""

    def reported(self, logits, drawn):
        return logits + 0.5 * torch.nn.functional.one_hot(drawn, self.vocab_size)


class ReportsAnotherTemperature(Waves):
    """Draws from the law before the temperature, and reports the one after it."""

    def draw(self, step, index, logits):
        return super().draw(step, index, 0.6 * logits)


class OneNumberForAll(Waves):
    """Draws every token of a row by the same number: each law is right, and together they are not."""

    def draw(self, step, index, logits):
        return super().draw(step, 0, logits)


class OnePercentOff(Waves):
    """Draws one token in a hundred from another law: too little for a sample of thousands."""

    def draw(self, step, index, logits):
        probs = 0.99 * logits.softmax(-1) + 0.01 / self.vocab_size
        return inverse_cdf(probs, step.random.uniform(index))
