"""What modules keep of each request besides keys and values: a state that every token changes for good.

A kept state is advanced over committed tokens only. Drafts are computed from a copy that is dropped, and the inputs
that they gave a module are kept. Where a request goes on, it tells by its position how many of them were accepted: the
module reads those inputs again, before its new tokens. Nothing else of the model is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from specdec.sdk.errors import IntegrityError

from ..device_memory import lazy_zeros
from .transfer import upload

if TYPE_CHECKING:
    from ..request.request import Scheduled

Kind = Literal["conv", "recurrent"]


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a state, without the dimension of requests."""

    kind: Kind
    index: int  # among those of its kind in a layer
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StateLayout:
    """What one module keeps of a request, and what it reads of a token."""

    tensors: tuple[StateTensor, ...]
    input_size: int
    dtype: torch.dtype  # of its input

    def bytes_per_row(self, num_drafts: int) -> int:
        """Bytes of one request: its state, and the inputs of its drafts."""
        state = sum(prod(each.shape) * each.dtype.itemsize for each in self.tensors)
        return state + num_drafts * self.input_size * self.dtype.itemsize


@dataclass(frozen=True)
class Member:
    """Tokens of a request that a module computes in one call."""

    row: int
    first: int  # where they begin in the batch
    num_tokens: int
    num_reread: int  # inputs of accepted drafts that are read before them


@dataclass(frozen=True)
class Group:
    """Requests that a module computes in one call, in the order of their rows."""

    members: tuple[Member, ...]
    length: int  # inputs of each
    is_fresh: bool  # whether their texts begin here
    decodes: bool  # whether they read inputs again, which plain decoding computes one by one
    device: torch.device

    @cached_property
    def rows(self) -> slice | Tensor:
        """A slice where they lie side by side. Captured passes never ask."""
        first, stop = self.members[0].row, self.members[-1].row + 1
        if stop - first == len(self.members):
            return slice(first, stop)
        return upload([[member.row for member in self.members]], self.device)[0]


@dataclass(frozen=True)
class StatePass:
    """How the requests of a pass are computed by modules with a state."""

    store: StateStore
    shares: tuple[Scheduled, ...] = ()
    kept: tuple[Group, ...] = ()  # committed tokens
    drafts: tuple[Group, ...] = ()
    order: tuple[int, ...] = ()  # of the pieces of all groups, one for each member, by place in the batch

    @property
    def even(self) -> tuple[int, int] | None:
        """Inputs that each request reads again before one token, and its drafts. None: requests differ, or begin."""
        read = {(member.num_reread, member.num_tokens) for group in self.kept for member in group.members}
        drafts = {share.num_draft_tokens for share in self.shares}
        (num_reread, num_tokens), num_drafts = read.pop(), drafts.pop()
        if read or drafts or num_tokens > 1 or self.kept[0].is_fresh:
            return None
        return num_reread, num_drafts


@dataclass(frozen=True, kw_only=True)
class EvenPass(StatePass):
    """A pass that may be captured: its requests have as many tokens each, rows lie in a tensor, and two numbers fix
    every shape. It has no shares, because whoever replays it keeps the books.
    """

    rows: Tensor  # [B] int64
    num_reread: int  # of each
    num_drafts: int  # of each; those that are too many harm nothing


class StateStore:
    """States of all rows by module, and where each row's state is in its text. One row more is nobody's."""

    def __init__(self, layouts: Sequence[StateLayout], num_rows: int, num_drafts: int, device: torch.device) -> None:
        """num_drafts: the most of one request in a pass."""
        self._device = device
        rows = num_rows + 1
        self.tensors = [
            [lazy_zeros((rows, *each.shape), each.dtype, device) for each in layout.tensors] for layout in layouts
        ]
        self.inputs = [lazy_zeros((rows, num_drafts, each.input_size), each.dtype, device) for each in layouts]
        self._books = [_NOBODY] * num_rows

    def fits(self, row: int, generation: int, start: int) -> bool:
        """Whether a request can go on at position `start`; not if a pass over it was interrupted."""
        return start == 0 or self._books[row].serves(generation, start)

    def plan(self, shares: Sequence[Scheduled]) -> StatePass:
        """A pass over these requests. Raises IntegrityError SD-E264 for one that cannot go on where it wants to."""
        kept = [self._member(share) for share in shares]
        drafts = [
            Member(share.request.row, share.first_draft, share.num_draft_tokens, 0)
            for share in shares
            if share.num_draft_tokens
        ]
        fresh = {share.request.row for share in shares if share.start == 0}
        groups = self._groups(kept, fresh), self._groups(drafts, set())
        places = [member.first for part in groups for group in part for member in group.members]
        order = sorted(range(len(places)), key=places.__getitem__)
        return StatePass(self, tuple(shares), *groups, tuple(order))

    def _member(self, share: Scheduled) -> Member:
        row, start = share.request.row, share.start
        if not self.fits(row, share.request.generation, start):
            facts = {"row": row, "position": start, "state": str(self._books[row])}
            raise IntegrityError("SD-E264", "a request's state is not where its text is", facts)
        replayed = start - self._books[row].position if start else 0
        return Member(row, share.first_token, share.num_tokens, replayed)

    def _groups(self, members: Sequence[Member], fresh: set[int]) -> tuple[Group, ...]:
        """Group the members of equal lengths."""

        def kind(member: Member) -> tuple[bool, bool, int]:
            return member.row in fresh, member.num_reread > 0, member.num_reread + member.num_tokens

        ordered = sorted(members, key=lambda member: (kind(member), member.row))
        return tuple(
            Group(tuple(each), length, is_fresh, decodes, self._device)
            for (is_fresh, decodes, length), each in groupby(ordered, kind)
        )

    @contextmanager
    def passing(self, passed: StatePass) -> Iterator[None]:
        """The pass is computed inside. Its states are nobody's until it ended well."""
        for share in passed.shares:
            self._books[share.request.row] = _NOBODY
        yield
        for share in passed.shares:
            owner, position = share.request, share.start + share.num_tokens
            self._books[owner.row] = _Book(owner.generation, position, share.num_draft_tokens)


@dataclass(frozen=True)
class _Book:
    """Whose state a row holds, and how far it goes."""

    generation: int
    position: int  # tokens that it has seen
    num_drafts: int  # whose inputs are kept

    def serves(self, generation: int, start: int) -> bool:
        return generation == self.generation and 0 <= start - self.position <= self.num_drafts


_NOBODY = _Book(-1, 0, 0)
