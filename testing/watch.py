"""Seeing which fields of a step a proposer reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from specdec.sdk.types import StepView

Record = TypeVar("Record")


def watched(step: StepView, reads: set[str]) -> StepView:
    """The same step; the names of fields that are read through it enter `reads`: "history", "kept.hidden", ..."""
    sampling = None if step.sampling is None else _watched(step.sampling, "sampling.", reads)
    return _watched(replace(step, kept=_watched(step.kept, "kept.", reads), sampling=sampling), "", reads)


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
