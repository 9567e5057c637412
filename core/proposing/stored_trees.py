"""Trees among the drafts of a batch, as verification reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..rejection.types import DraftDistributions

if TYPE_CHECKING:
    from .draft_table import DraftReport


class Stored(Protocol):
    """A draft that waits."""

    @property
    def report(self) -> DraftReport | None: ...


def parents_of(stored: Iterable[Stored], lengths: Sequence[int]) -> list[list[int]] | None:
    """The parents of each draft's first `lengths` nodes; a chain's are those before them. None: all are chains."""
    known = [each.report.parents if each.report else None for each in stored]
    if not any(known):
        return None
    pairs = zip(known, lengths, strict=True)
    return [[*range(-1, length - 1)] if parents is None else parents[:length] for parents, length in pairs]


def tree_table(parents: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """[B, width] int64, padded with -1."""
    padded = [[*each, *[-1] * (width - len(each))] for each in parents]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(parents), width)


def with_replacement(found: DraftDistributions, rows: Sequence[bool]) -> DraftDistributions:
    """The same, and in which rows siblings were drawn with replacement."""
    return replace(found, replacement=torch.tensor(rows, device=found.kind.device)) if any(rows) else found
