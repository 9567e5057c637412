"""Seeing what a proposer does with a step: which fields it reads, and whether it writes to any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..types import StepView

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


class Snapshot:
    """Copies of every tensor of a step."""

    def __init__(self, step: StepView) -> None:
        self._kept = [(name, tensor, tensor.clone()) for name, tensor in _tensors(step)]

    def changed(self) -> list[str]:
        """The fields that are different now."""
        return [name for name, tensor, copy in self._kept if not _same(tensor, copy)]


def _tensors(step: StepView) -> Iterator[tuple[str, Tensor]]:
    for prefix, record in (("", step), ("kept.", step.kept), ("sampling.", step.sampling)):
        for name, value in vars(record).items() if record is not None else ():
            if isinstance(value, Tensor):
                yield f"step.{prefix}{name}", value


def _same(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.shape == copy.shape and bool(torch.equal(tensor.nan_to_num(), copy.nan_to_num()))
