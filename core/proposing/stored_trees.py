"""Trees among the drafts of a batch, as verification reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .draft_table import DraftReport


class Stored(Protocol):
    """A draft that waits."""

    @property
    def report(self) -> DraftReport | None: ...
    @property
    def replacement(self) -> bool: ...


def parents_of(stored: Iterable[Stored], lengths: Sequence[int]) -> list[list[int]] | None:
    """The parents of each draft's first `lengths` nodes; a chain's are those before them. None: all are chains."""
    known = [each.report.parents if each.report else None for each in stored]
    if not any(known) or not any(lengths):
        return None
    pairs = zip(known, lengths, strict=True)
    return [[*range(-1, length - 1)] if parents is None else parents[:length] for parents, length in pairs]


def tree_columns(parents: Sequence[Sequence[int]], width: int, stored: Sequence[Stored]) -> list[list[int]]:
    """What has to be sent of trees: parents [B, width], padded with -1, and whether siblings were put back [B]."""
    padded = [number for each in parents for number in (*each, *[-1] * (width - len(each)))]
    return [padded, [each.replacement for each in stored]]
