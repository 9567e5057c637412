"""A drafter on a vocabulary that can be enumerated: what it draws, and what the verifier is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.host import CheckedDraft, DistributionBuffers, DraftReport, DraftStore, rejection
from specdec.sdk.needs import Needs
from specdec.sdk.types import DistributionKind, DraftDistribution

from .drawn_tree import Node

Prefix = tuple[int, ...]
Part = Callable[[DraftDistribution], Tensor | None]


@dataclass(frozen=True)
class SmallDrafter:
    """The drafter's distributions after every prefix of its own drafts. It stops at a prefix without a node."""

    nodes: Mapping[Prefix, Node]
    num_drafts: int
    vocab_size: int
    needs: Needs

    @property
    def distribution(self) -> DraftDistribution | None:
        """What it reported first, which tells the form of all."""
        return self.nodes[()].distribution

    @property
    def has_distribution(self) -> bool:
        """Whether it reports distributions at all."""
        return self.distribution is not None and int(self.distribution.kind[0]) != DistributionKind.ONE_HOT

    @property
    def in_half_precision(self) -> bool:
        """Whether a reported distribution is rounded to 16 bits."""
        parts = (
            ()
            if self.distribution is None
            else (self.distribution.probs, self.distribution.logits, self.distribution.sparse_probs)
        )
        return any(part is not None and part.dtype.itemsize == 2 for part in parts)

    @property
    def drafts_trees(self) -> bool:
        """Whether its drafts are nodes of trees."""
        return self.nodes[()].parent is not None

    def parents(self, row: Prefix) -> list[int] | None:
        """Where each draft of a row hangs. None: they are a chain."""
        found = [self.nodes.get(row[:i], self.nodes[()]).parent for i in range(len(row))]
        return None if None in found else [parent for parent in found if parent is not None]

    def drawn(self, position: int) -> Tensor:
        """The distribution of the draft at `position` after every prefix, float64 [V, ..., V]; token 0 where there is
        none.
        """
        table = torch.zeros([self.vocab_size] * (position + 1), dtype=torch.float64)
        table[..., 0] = 1
        for prefix, node in self.nodes.items():
            if len(prefix) == position:
                table[prefix] = node.drawn
        return table

    def report(self, drafts: Tensor) -> rejection.DraftRows:
        """What verification is given for the drafts [T, K], after the engine's own store."""
        rows = [tuple(row) for row in drafts.tolist()]
        lengths = [len(self.verified(row)) for row in rows]
        beyond = torch.arange(drafts.shape[1]) >= torch.tensor(lengths)[:, None]
        distributions = None
        if self.has_distribution:
            assert self.distribution is not None, "it has one"
            numbers = list(range(len(rows)))
            store = DraftStore(self._buffers(len(rows)), keeps_trees=self.drafts_trees)
            kind = int(self.distribution.kind[0])
            reports = [DraftReport(len(row), len(row), kind, list(row), parents=self.parents(row)) for row in rows]
            store.put(numbers, numbers, CheckedDraft.read(reports, self._distribution_of(rows)))
            taken = store.take([(number, number, self.num_drafts) for number in numbers])
            sent = [torch.tensor(column) for column in taken.columns([0] * len(rows))]
            distributions = taken.put_in(torch.empty(0), sent)[0].distributions
        return rejection.DraftRows(drafts.masked_fill(beyond, -1), torch.tensor(lengths), distributions)

    def verified(self, row: Prefix) -> Prefix:
        """The longest beginning of a row that this drafter makes itself."""
        return row[: next((i for i in range(len(row)) if row[:i] not in self.nodes), len(row))]

    def _distribution_of(self, rows: Sequence[Prefix]) -> DraftDistribution:
        """The reported tensors, place by place from the step in which what hangs there was drawn."""
        assert self.distribution is not None, "asked for where there is one"
        return DraftDistribution(
            kind=self.distribution.kind[:1].expand(len(rows)).clone(),
            replacement=self.distribution.replacement,
            probs=self._gathered(rows, lambda distribution: distribution.probs),
            logits=self._gathered(rows, lambda distribution: distribution.logits),
            sparse_ids=self._gathered(rows, lambda distribution: distribution.sparse_ids),
            sparse_probs=self._gathered(rows, lambda distribution: distribution.sparse_probs),
        )

    def _gathered(self, rows: Sequence[Prefix], part: Part) -> Tensor | None:
        if self.distribution is None or part(self.distribution) is None:
            return None
        return torch.stack([torch.stack([self._at(row, place, part) for place in range(len(row))]) for row in rows])

    def _at(self, row: Prefix, place: int, part: Part) -> Tensor:
        parents = self.parents(row) or range(-1, len(row) - 1)
        prefix = next((row[:i] for i, parent in enumerate(parents) if parent + 1 == place), ())
        distribution = self.nodes.get(prefix, self.nodes[()]).distribution
        tensor = part(distribution) if distribution is not None else None
        assert tensor is not None, "every node reports what the first one reports"
        return tensor[0, place]

    def _buffers(self, num_rows: int) -> DistributionBuffers:
        width, t2d = (self.needs.sparse_top_m if self.needs.stored_form == "sparse" else self.vocab_size), None
        if self.needs.draft_vocabulary is not None:
            width = len(self.needs.draft_vocabulary)
            t2d = torch.full((self.vocab_size,), -1)
            t2d[torch.tensor(self.needs.draft_vocabulary)] = torch.arange(width)
        shape = (num_rows, self.num_drafts, width)
        return DistributionBuffers.allocate(self.needs.stored_form, shape, t2d, torch.device("cpu"))
