"""Mistakes in the form of drafts and at the edges of steps."""

from __future__ import annotations

import torch
from good_proposers import Followers, Waves

from specdec.sdk import DistributionKind, Draft, DraftDistribution, Needs
from specdec.sdk.extensions import TargetLayers


class RaisesInBind(Followers):
    def bind(self, target, services):
        raise RuntimeError("no weights here")


class RefusesItsOwnState(Followers):
    @classmethod
    def needs(cls, config, target):
        return Needs(history=True, extensions=(TargetLayers(layers=(10**6,)),))


class FloatLengths(Followers):
    def propose(self, step):
        draft = super().propose(step)
        return Draft(draft.token_ids, draft.lengths.float())


class OutOfVocabulary(Followers):
    def draft(self, step, b, budget):
        return [self.target.vocab_size] * budget


class Transposed(Followers):
    def propose(self, step):
        draft = super().propose(step)
        return Draft(draft.token_ids.T.contiguous(), draft.lengths)


class UndeclaredDistribution(Followers):
    def propose(self, step):
        draft = super().propose(step)
        distribution = DraftDistribution(kind=torch.full((len(step),), int(DistributionKind.SPARSE), dtype=torch.uint8))
        return Draft(draft.token_ids, draft.lengths, distribution=distribution)


class FixedWidth(Followers):
    """Always four columns, which is the default K."""

    def propose(self, step):
        drafts = [self.draft(step, b, min(budget, 4)) for b, budget in enumerate(step.budget.tolist())]
        return Draft.from_lists(drafts, 4)


class RemembersK(Followers):
    """Takes K from its configuration, not from the step."""

    def propose(self, step):
        drafts = [self.draft(step, b, budget) for b, budget in enumerate(step.budget.tolist())]
        return Draft.from_lists(drafts, self.config.num_draft_tokens)


class IgnoresBudget(Followers):
    def draft(self, step, b, budget):
        return super().draft(step, b, step.width)


class DraftsWhereNothingIsWanted(Followers):
    def draft(self, step, b, budget):
        return super().draft(step, b, max(budget, 1))


class NeedsTwoTokens(Followers):
    def on_start(self, request):
        super().on_start(request)
        self.second = request.prompt_token_ids[1]


class RunsOverTheEnd(Followers):
    """Has room for max_model_len tokens, and writes its drafts behind the newest one."""

    def propose(self, step):
        draft = super().propose(step)
        room = torch.zeros(self.target.max_model_len)
        for length in step.committed_length.tolist():
            room[torch.arange(length, length + step.width)] = 1
        return draft


class NanLogits(Waves):
    def reported(self, logits, drawn):
        return logits.masked_fill(torch.arange(self.vocab_size) == 3, torch.nan)


class ReportsTopOne(Waves):
    """Draws from the whole distribution and reports its most likely token alone."""

    def reported(self, logits, drawn):
        return logits.masked_fill(logits < logits.max(-1, keepdim=True).values, -torch.inf)
