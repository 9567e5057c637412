"""Proposers made of others."""

from __future__ import annotations

from specdec.sdk import Draft, Proposer, ProposerBase, StepView
from specdec.sdk.combinators import Adaptive, Chain


class Last(ProposerBase):
    def propose(self, step: StepView) -> Draft:
        return Draft(step.newest_token[:, None].expand(-1, step.width), step.budget)


class Nothing(ProposerBase):
    def propose(self, step: StepView) -> Draft:
        return Draft.from_lists([[] for _ in step.requests], step.width)


class Both(Chain):
    parts = (Nothing, Last)


class Shorter(Adaptive):
    parts = (Last,)


made: type[Proposer] = Chain.of(Nothing, Both)
