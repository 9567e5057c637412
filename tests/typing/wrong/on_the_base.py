"""Mistakes in a class on the base."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from specdec.sdk import (
    Draft,
    HostProposer,
    LateProposer,
    Needs,
    ProposerBase,
    ProposerConfig,
    RequestView,
    StepView,
    StrictModel,
    TargetInfo,
    typed,
)
from specdec.sdk.extensions import DraftKV, MetricsMethods, TargetTokens


class Attributes(ProposerBase):
    api_version = 1  #: mypy assignment, pyright reportAssignmentType
    needs = "history"  #: mypy assignment, pyright reportAssignmentType
    default_draft_tokens = 2.5  #: mypy assignment, pyright reportAssignmentType

    def propose(self, step: StepView) -> Draft:
        return Draft(step.newest_token[:, None], step.budget)


class NeedsOfAnotherType(ProposerBase):
    @classmethod
    def needs(cls, config: object, target: object) -> str:  #: mypy override, strict reportIncompatibleVariableOverride
        return "history"

    def propose(self, step: StepView) -> Draft:
        return Draft(step.newest_token[:, None], step.budget)


class Arguments(ProposerBase):
    def observe(self) -> None: ...  #: mypy override, strict reportIncompatibleMethodOverride

    def on_finish(self, request: str) -> None: ...  #: mypy override, strict reportIncompatibleMethodOverride

    @override
    def on_strat(self, request: RequestView) -> None: ...  #: mypy misc, pyright reportGeneralTypeIssues

    def propose(self, step: StepView) -> list[int]:  #: mypy override, strict reportIncompatibleMethodOverride
        return [1]


class Figures(ProposerBase, MetricsMethods):
    def metrics(self, kind: str) -> dict[str, float]:  #: mypy override, strict reportIncompatibleMethodOverride
        return {kind: 1.0}

    def propose(self, step: StepView) -> Draft:
        return Draft(step.newest_token[:, None], step.budget)


class WithoutFigures(ProposerBase, MetricsMethods):
    def propose(self, step: StepView) -> Draft:
        return Draft(step.newest_token[:, None], step.budget)


class WithoutItsRequest(HostProposer):
    def draft(  #: mypy override, strict reportIncompatibleMethodOverride
        self, tokens: Sequence[int], k: int
    ) -> list[int]:
        return []


class WithoutK(LateProposer):
    def ask(  #: mypy override, strict reportIncompatibleMethodOverride
        self, request: RequestView, tokens: Sequence[int]
    ) -> list[int]:
        return []


@typed.proposer  #: pyright reportArgumentType
@typed.observe  #: pyright reportArgumentType
class Decorated(ProposerBase):  #: mypy type-var
    """What the basic mode of pyright finds too."""

    def observe(self) -> None: ...  #: mypy override, strict reportIncompatibleMethodOverride

    def propose(self, step: StepView) -> list[int]:  #: mypy override, strict reportIncompatibleMethodOverride
        return [1]


class Unfinished(ProposerBase):
    def observe(self, step: StepView) -> None: ...


class Misspelt(HostProposer):
    class Options(StrictModel):
        length: int = 2

    class RequestOptions(StrictModel):
        reference: str = ""

    config: ProposerConfig[Options]

    @classmethod
    def needs(cls, config: ProposerConfig[Options], target: TargetInfo) -> Needs:
        k = config.options.typo  #: mypy attr-defined, pyright reportAttributeAccessIssue
        return Needs(max_draft_tokens=k)

    def draft(self, request: RequestView[RequestOptions], tokens: Sequence[int], k: int) -> Sequence[int]:
        print(request.options.typo)  #: mypy attr-defined, pyright reportAttributeAccessIssue
        return tokens[-self.config.options.typo :]  #: mypy attr-defined, pyright reportAttributeAccessIssue

    def on_start(self, request: RequestView[RequestOptions]) -> None:
        print(request.end.reason)  #: mypy union-attr, pyright reportOptionalMemberAccess


class InTheStep(ProposerBase):
    def propose(self, step: StepView[Misspelt.RequestOptions]) -> Draft:
        print(step.requests[0].options.typo)  #: mypy attr-defined, pyright reportAttributeAccessIssue
        print(step.num_comitted)  #: mypy attr-defined, pyright reportAttributeAccessIssue
        print(step.history.tail(2))  #: mypy union-attr, pyright reportOptionalMemberAccess
        return Draft(step.newest_token[:, None], step.budget, None)  #: mypy call-arg, pyright reportCallIssue


Unfinished(ProposerConfig(num_draft_tokens=3))  #: mypy abstract, pyright reportAbstractUsage
ProposerConfig(num_draft_token=3)  #: mypy call-arg, pyright reportCallIssue
ProposerConfig()  #: mypy call-arg, pyright reportCallIssue
WithoutFigures(ProposerConfig(num_draft_tokens=3))  #: mypy abstract, pyright reportAbstractUsage
Needs(histroy=True)  #: mypy call-arg, pyright reportCallIssue
Needs(placement="gpu")  #: mypy arg-type, pyright reportArgumentType
Needs(extensions=(3,))  #: mypy arg-type, pyright reportArgumentType
Needs(extensions="trees@1")  #: mypy arg-type, pyright reportArgumentType
DraftKV(num_layers=1, num_heads=1, head_dims=8)  #: mypy call-arg, pyright reportCallIssue
TargetTokens()  #: mypy call-arg, pyright reportCallIssue
Misspelt.Options(lenght=3)  #: mypy call-arg, pyright reportCallIssue
