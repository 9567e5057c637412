"""Mistakes in classes without a base."""

from __future__ import annotations

from pathlib import Path

from specdec.sdk import Draft, Proposer, ProposerConfig, RequestView, StepView, typed


@typed.proposer  #: pyright reportArgumentType
@typed.observe  #: pyright reportArgumentType
@typed.on_finish  #: pyright reportArgumentType
@typed.on_start  #: pyright reportArgumentType
class Mine:  #: mypy type-var
    def __init__(self, config: ProposerConfig) -> None: ...

    def observe(self) -> None: ...

    def on_finish(self, request: str) -> None: ...

    def on_strat(self, request: RequestView) -> None: ...

    def propose(self, step: StepView) -> list[int]:
        return [1]


@typed.state  #: pyright reportArgumentType
@typed.metrics  #: pyright reportArgumentType
class Remembers:  #: mypy type-var
    def save(self, path: Path) -> None: ...

    def metrics(self) -> list[float]:
        return []


@typed.proposer  #: pyright reportArgumentType
class Constructor:  #: mypy type-var
    def __init__(self, config: ProposerConfig, more: int) -> None: ...

    def propose(self, step: StepView) -> Draft:
        return Draft(step.newest_token[:, None], step.budget)


offered: list[type[Proposer]] = [Mine]  #: mypy list-item, pyright reportAssignmentType
