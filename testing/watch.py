"""Seeing what a proposer is shown, which fields of it are read, and what it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.core.host import (
    CheckedDraft,
    DraftReport,
    EngineMetrics,
    ProposerHost,
    Snapshot,
    ViewBuilder,
    registry,
    tensors_of,
)
from specdec.sdk import StepView, TargetInfo
from specdec.sdk.hooks import StepStats

from .moves import GivenUniforms, Shown

Record = TypeVar("Record")
Answer = TypeVar("Answer")


@dataclass
class Uses:
    """What a proposer uses while it is checked."""

    reads: set[str] = field(default_factory=set)  # names of fields and services: "history", "kept.hidden", "draft_kv"
    collectives: list[str] = field(default_factory=list)  # calls of services that all ranks make together, with shapes
    astray: list[str] = field(default_factory=list)  # calls of services outside of calls, or on other threads
    inside: int | None = None  # the thread of the call that runs. None means that none runs

    def service(self, name: str, *shape: int) -> None:
        """Note that a service is called. shape: of its input, where it is a collective."""
        if threading.get_ident() != self.inside:
            self.astray.append(name)
        if shape:
            self.collectives.append(f"{name}{shape}")


class WatchedHost(ProposerHost):
    """The engine's own host of a proposer, which keeps what it showed last. It holds every error against it."""

    def __init__(
        self,
        loaded: registry.LoadedProposer,
        info: TargetInfo,
        device: torch.device,
        views: ViewBuilder,
        metrics: EngineMetrics,
        uses: Uses,
    ) -> None:
        """`uses`: takes what is used."""
        super().__init__(loaded, info, device, "raise", metrics, lambda error: None, views)
        self._uses = uses
        self.spoils = False  # whether what a step lends holds something else when the call is over

    def begin(
        self, number: int, seed: int, width: int | None = None, uniforms: Tensor | None = None, *, dummy: bool = False
    ) -> None:
        """A step begins. `width`: its K, if not the usual. `uniforms` [B, K]: its random numbers, if chosen.

        dummy: see `StepView.dummy`.
        """
        self.shown: Shown | None = None  # None as well where no request goes on
        self.width = self.views.width if width is None else width
        self._number, self._seed, self._uniforms, self._dummy = number, seed, uniforms, dummy

    def draft(self, step: StepView, budgets: Sequence[int]) -> CheckedDraft | None:
        """Draft as `ProposerHost` does, and note what the proposer used."""
        step = replace(step, width=self.width, dummy=self._dummy)
        if self._uniforms is not None:
            step = replace(step, random=GivenUniforms(self._uniforms))
        before = Snapshot(step)
        copied = _copied(step) if self.spoils else step
        checked = super().draft(watched(copied, self._uses.reads), budgets)
        self.shown = Shown(
            f"step {self._number} of seed {self._seed}, requests {_some(step.request_ids)}",
            step,
            list(budgets),
            checked.token_ids if checked else [[] for _ in budgets],
            [_parents(each) if each else [] for each in checked.reports] if checked else [[] for _ in budgets],
            _cloned(checked.distribution) if checked and checked.distribution else None,  # its memory is the proposer's
            before.changes(),
        )
        if self.spoils:
            _spoil(copied)
        return checked

    def _attempt(self, method: str, call: Callable[[], Answer]) -> Answer:
        outer, self._uses.inside = self._uses.inside, threading.get_ident()
        try:
            return super()._attempt(method, call)
        finally:
            self._uses.inside = outer

    def keep_pace(self, stats: StepStats, seconds: float) -> None:
        """Do nothing: no target runs whose time drafts could save."""


def _copied(step: StepView) -> StepView:
    """The same step, with copies of its tensors."""
    kept = replace(_cloned(step.kept), hidden=tuple(state.clone() for state in step.kept.hidden))
    sampling, rejected = step.sampling and _cloned(step.sampling), step.rejected and _cloned(step.rejected)
    return replace(_cloned(step), kept=kept, sampling=sampling, rejected=rejected)


def _cloned(record: Record) -> Record:
    tensors: dict[str, Any] = {name: each.clone() for name, each in vars(record).items() if isinstance(each, Tensor)}
    copy: Record = replace(record, **tensors)  # type: ignore[type-var]
    return copy


def _spoil(step: StepView) -> None:
    """Write over its tensors, as the next step on a device does."""
    for _, value in tensors_of(step):
        value.fill_(torch.nan if value.is_floating_point() else 0)


def _parents(report: DraftReport) -> list[int]:
    return [*range(-1, report.length - 1)] if report.parents is None else report.parents[: report.length]


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    few = 6
    return ", ".join(names[:few]) + (f" and {len(names) - few} more" if len(names) > few else "")


def watched(step: StepView, reads: set[str]) -> StepView:
    """The same step; the names of fields that are read through it enter `reads`: "history", "kept.hidden", ..."""
    parts = {name: getattr(step, name) for name in ("kept", "sampling", "rejected")}
    seen = {name: part and _watched(part, f"{name}.", reads) for name, part in parts.items()}
    return _watched(replace(step, **seen), "", reads)


def _watched(record: Record, prefix: str, reads: set[str]) -> Record:
    kind = type(record)

    def read(self: Any, name: str) -> Any:
        reads.add(prefix + name)
        return kind.__getattribute__(self, name)

    subclass: Any = type(kind.__name__, (kind,), {"__getattribute__": read})
    copy: Record = object.__new__(subclass)
    for name, value in vars(record).items():
        object.__setattr__(copy, name, value)
    return copy
