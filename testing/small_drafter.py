"""A drafter on a vocabulary that can be enumerated: what it draws, and what the verifier is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.proposing.draft_store import DraftStore, LawBuffers
from specdec.core.rejection import DraftRows
from specdec.sdk.needs import Needs
from specdec.sdk.types import DraftLaw, LawKind

from .drawn_tree import Node

Prefix = tuple[int, ...]
Part = Callable[[DraftLaw], Tensor | None]


@dataclass(frozen=True)
class SmallDrafter:
    """Its laws after every prefix of its own drafts; a prefix without a node is where it stops."""

    nodes: Mapping[Prefix, Node]
    num_drafts: int
    vocab_size: int
    needs: Needs

    @property
    def law(self) -> DraftLaw | None:
        """What it reported first, which tells the form of all."""
        return self.nodes[()].law

    @property
    def has_law(self) -> bool:
        """Whether it reports laws at all."""
        return self.law is not None and int(self.law.kind[0]) != LawKind.ONE_HOT

    @property
    def in_half_precision(self) -> bool:
        """Whether a reported law is rounded to 16 bits."""
        parts = () if self.law is None else (self.law.probs, self.law.logits, self.law.sparse_probs)
        return any(part is not None and part.dtype.itemsize == 2 for part in parts)

    def drawn(self, position: int) -> Tensor:
        """The law of the draft at `position` after every prefix, float64 [V, ..., V]; token 0 where there is none."""
        table = torch.zeros([self.vocab_size] * (position + 1), dtype=torch.float64)
        table[..., 0] = 1
        for prefix, node in self.nodes.items():
            if len(prefix) == position:
                table[prefix] = node.drawn
        return table

    def report(self, drafts: Tensor) -> DraftRows:
        """What verification is given for the drafts [T, K], after the engine's own store."""
        rows = [tuple(row) for row in drafts.tolist()]
        lengths = [next((i for i in range(len(row)) if row[:i] not in self.nodes), len(row)) for row in rows]
        ids = [list(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        beyond = torch.arange(drafts.shape[1]) >= torch.tensor(lengths)[:, None]
        laws = None
        if self.has_law:
            assert self.law is not None, "it has one"
            numbers = list(range(len(rows)))
            store = DraftStore(self._buffers(len(rows)))
            store.put(numbers, numbers, ids, self._law_of(rows))
            laws = store.laws(numbers, [LawKind(int(self.law.kind[0]))] * len(rows), self.num_drafts)
        return DraftRows(drafts.masked_fill(beyond, -1), torch.tensor(lengths), laws)

    def _law_of(self, rows: Sequence[Prefix]) -> DraftLaw:
        """The reported tensors, position by position from the step in which the row's prefix was drawn."""
        assert self.law is not None, "asked for where there is one"
        return DraftLaw(
            kind=self.law.kind[:1].expand(len(rows)).clone(),
            probs=self._gathered(rows, lambda law: law.probs),
            logits=self._gathered(rows, lambda law: law.logits),
            sparse_ids=self._gathered(rows, lambda law: law.sparse_ids),
            sparse_probs=self._gathered(rows, lambda law: law.sparse_probs),
        )

    def _gathered(self, rows: Sequence[Prefix], part: Part) -> Tensor | None:
        if self.law is None or part(self.law) is None:
            return None
        return torch.stack([torch.stack([self._at(row[:i], part) for i in range(len(row))]) for row in rows])

    def _at(self, prefix: Prefix, part: Part) -> Tensor:
        law = self.nodes.get(prefix, self.nodes[()]).law
        tensor = part(law) if law is not None else None
        assert tensor is not None, "every node reports what the first one reports"
        return tensor[0, len(prefix)]

    def _buffers(self, num_rows: int) -> LawBuffers:
        width, t2d = (self.needs.sparse_top_m if self.needs.law == "sparse" else self.vocab_size), None
        if self.needs.draft_vocabulary is not None:
            width = len(self.needs.draft_vocabulary)
            t2d = torch.full((self.vocab_size,), -1)
            t2d[torch.tensor(self.needs.draft_vocabulary)] = torch.arange(width)
        shape = (num_rows, self.num_drafts, width)
        return LawBuffers.allocate(self.needs.law, shape, t2d, torch.device("cpu"))
