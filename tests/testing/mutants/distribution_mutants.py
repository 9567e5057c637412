"""Distributions that are not the distribution of the draw."""

from __future__ import annotations

import torch
from good_proposers import Waves, inverse_cdf

from specdec.sdk import DistributionKind, Draft, DraftDistribution, Needs


class TrimsUnluckyTokens(Waves):
    """Stops before a token whose own probability is low."""

    def lengths(self, step, token_ids, distribution):
        likely = distribution.softmax(-1).gather(2, token_ids[:, :, None])[:, :, 0] > 1.2 / self.vocab_size
        return torch.minimum(step.budget, likely.long().cumprod(1).sum(1))


class TrimsFromTheSecond(Waves):
    """The same, but for the first token: seen only where two requests draw the same first one."""

    def lengths(self, step, token_ids, distribution):
        likely = distribution.softmax(-1).gather(2, token_ids[:, :, None])[:, :, 0] > 1.2 / self.vocab_size
        likely[:, 0] = True
        return torch.minimum(step.budget, likely.long().cumprod(1).sum(1))


class SharpensAfterTheDraw(Waves):
    """Reports a little more for the token that it drew."""

    def reported(self, logits, drawn):
        return logits + 0.5 * torch.nn.functional.one_hot(drawn, self.vocab_size)


class ReportsAnotherTemperature(Waves):
    """Draws from the distribution before the temperature, and reports the one after it."""

    def draw(self, step, index, logits):
        return super().draw(step, index, 0.6 * logits)


class LiesAtTheLastPlace(Waves):
    """Draws its fourth token from the distribution before the temperature: one of four, where K is four."""

    def draw(self, step, index, logits):
        return super().draw(step, index, 0.6 * logits if index == 3 else logits)


class LiesInOneRow(Waves):
    """Draws the sixth row of a step from the distribution before the temperature."""

    def draw(self, step, index, logits):
        return super().draw(step, index, torch.cat([logits[:5], 0.6 * logits[5:6], logits[6:]]))


class OneNumberForAll(Waves):
    """Draws every token of a row by the same number: each distribution is right, and together they are not."""

    def draw(self, step, index, logits):
        return super().draw(step, 0, logits)


class OnePercentOff(Waves):
    """Draws one token in a hundred from another distribution: too little for a sample of thousands."""

    def draw(self, step, index, logits):
        probs = 0.99 * logits.softmax(-1) + 0.01 / self.vocab_size
        return inverse_cdf(probs, step.random.uniform(index))


class SparseDistribution(Waves):
    """The whole distribution again, as a sparse one."""

    TOP_M = 64

    needs = Needs(distributions=("sparse",), sparse_top_m=TOP_M, sampling=("temperature",))

    def logits(self, before, temperature):
        return super().logits(before, temperature).masked_fill(torch.arange(self.vocab_size) >= self.TOP_M, -torch.inf)

    def propose(self, step):
        draft = super().propose(step)
        kind = torch.where(
            draft.distribution.kind == DistributionKind.ONE_HOT, DistributionKind.ONE_HOT, DistributionKind.SPARSE
        ).to(torch.uint8)
        ids = self.ids().expand(*draft.token_ids.shape, self.TOP_M).clone()
        probs = torch.nn.functional.pad(draft.distribution.logits, (0, self.TOP_M), value=-torch.inf)[..., : self.TOP_M]
        distribution = DraftDistribution(kind=kind, sparse_ids=ids, sparse_probs=probs.softmax(-1))
        return Draft(draft.token_ids, draft.lengths, distribution=distribution)

    def ids(self):
        ids = torch.arange(self.TOP_M)
        return ids.masked_fill(ids >= self.vocab_size, -1)


class SparseIdsOutOfRange(SparseDistribution):
    """Ids of a vocabulary that the target has not."""

    def ids(self):
        return super().ids() + 1_000_000
