"""Mistakes in combinators, services and hooks."""

from __future__ import annotations

from specdec.sdk import ProposerBase, Registry, Services, StepView, TargetInfo
from specdec.sdk.combinators import Chain


class NoProposer:
    def observe(self, step: StepView) -> None: ...


class Both(Chain):
    parts = (NoProposer,)  #: mypy assignment, pyright reportAssignmentType


class Consumer(ProposerBase):
    def bind(self, target: TargetInfo, services: Services) -> None:
        print(services.lm_heads, target.vocabulary)  #: mypy attr-defined, pyright reportAttributeAccessIssue
        services.embed([1, 2])  #: mypy arg-type, pyright reportArgumentType


def register_proposers(registry: Registry) -> None:
    registry.add("last")  #: mypy call-arg, pyright reportCallIssue
