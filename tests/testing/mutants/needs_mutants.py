"""Declarations that do not say what is done."""

from __future__ import annotations

from typing import Any

import torch
from good_proposers import Followers, HiddenMean, Waves

from specdec.sdk import Draft, Needs, StrictModel
from specdec.sdk.extensions import DraftKV


class ReadsHistoryUndeclared(Followers):
    needs = Needs(state="per_request")


class ReadsHistoryIfThere(Followers):
    """Works without, and better with."""

    needs = Needs(state="per_request")

    def learn(self, step, b, row, length):
        if step.history is not None:
            super().learn(step, b, row, length)

    def draft(self, step, b, budget):
        tokens = self.tokens[step.request_ids[b]] or [int(step.newest_token[b])]
        return [tokens[0]] * budget


class NeverReadsHidden(Followers):
    needs = Needs(history=True, hidden_states=("final",))


class NeverUsesDraftKV(Followers):
    needs = Needs(history=True, extensions=(DraftKV(num_layers=1, num_heads=1, head_dim=4),))


class NeverReadsTopK(Waves):
    needs = Needs(distributions=("dense",), sampling=("temperature", "top_k"))


class NeverReportsItsDistribution(Waves):
    def propose(self, step):
        draft = super().propose(step)
        return Draft(draft.token_ids, draft.lengths)


class ShorterThanDeclared(Followers):
    needs = Needs(history=True, min_draft_tokens=3)

    def draft(self, step, b, budget):
        return super().draft(step, b, min(budget, 1))


class WritesMoreThanDeclared(HiddenMean):
    """One position behind the newest token is reserved, and it writes two."""

    def propose(self, step):
        store, keys = self.services.draft_kv(), torch.zeros(len(step), 1, self.WIDTH)
        for ahead in range(2):
            store.write(0, step.slots, step.committed_length - 1 + ahead, keys, keys)
        return super().propose(step)


class AttendsFurtherThanDeclared(HiddenMean):
    """The same with a pass of attention over three positions."""

    def propose(self, step):
        bounds = 3 * torch.arange(len(step) + 1)
        self.services.draft_kv().attention(step.slots, step.committed_length - 1, bounds)
        return super().propose(step)


class OptionsOfCode(HiddenMean):
    class Options(StrictModel):
        offset: int = 0
        score: Any = lambda token: token
