"""Trees whose nodes are drawn from a network's distributions, siblings without replacement (arXiv 2402.12374).

They are drawn level by level. The shape is the best one for given rates of acceptance, as far as the distributions have
so many entries. So where a node hangs depends on nodes before it alone, and no drawn node is left out. That makes
verification exact (docs/explanation/trees.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..trees import depths, draw_siblings, shape_of_rates
from .greedy_tree import BEAM, Level
from .sampling import DrawRule, FilteredDrawing
from .vocabulary import target_ids

RATES = (0.71, 0.095, 0.037, 0.017, 0.01, 0.006, 0.004, 0.003)
"""How often the sibling of each rank was accepted where its place was reached, measured with a head of one layer."""


@cache
def widths_of(num_nodes: int, max_depth: int) -> tuple[tuple[int, ...], ...]:
    """How many nodes each level of the best tree has: [num_nodes + 1][levels], for every number of nodes up to all."""
    levels = depths([parent for parent, _ in shape_of_rates(RATES, num_nodes, max_depth)])
    counts = [Counter(levels[:size]) for size in range(num_nodes + 1)]
    return tuple(tuple(each[depth + 1] for depth in range(max(levels, default=0))) for each in counts)


@dataclass(frozen=True)
class DrawnShape:
    """The shape of drawn trees, for every number of nodes up to the most: nothing of it changes from step to step."""

    num_nodes: int
    widest: tuple[int, ...]  # [levels] nodes of each level of the largest tree
    widths: Tensor  # [num_nodes + 1, levels] int64, nodes of each level of the tree of so many nodes
    rates: Tensor  # [ranks] float32

    @classmethod
    def of(cls, num_nodes: int, max_depth: int, device: torch.device) -> Self:
        """num_nodes: the most of a request. max_depth: the most on a path."""
        widths = widths_of(num_nodes, max_depth)
        return cls(num_nodes, widths[-1], torch.tensor(widths, device=device), torch.tensor(RATES, device=device))


@dataclass(frozen=True)
class Slots:
    """Where the nodes of a level hang: below which place of the level above, and which sibling they are there."""

    numbers: Tensor  # [b, n] place * num_ranks + rank, in rising order; behind the last slot where there is no node
    scores: Tensor  # [b, n] float32, the product of rates on the path; 0 where there is no node
    num_ranks: int
    num_places: int

    @property
    def exist(self) -> Tensor:
        """[b, n] bool."""
        return self.scores > 0

    def drawn(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """The entry of each node [b, n], from the distributions of the places [b * w, M] and its uniform [b, n]."""
        count, num_slots = len(uniforms), self.num_places * self.num_ranks
        table = uniforms.new_full((count, num_slots + 1), 0.5).scatter_(1, self.numbers, uniforms)[:, :-1]
        entries = draw_siblings(probs, table.reshape(-1, self.num_ranks)).clamp(min=0)
        return entries.view(count, num_slots).gather(1, self.numbers.clamp(max=num_slots - 1))

    @property
    def places(self) -> Tensor:
        """The place of each node, [b, n]."""
        return (self.numbers // self.num_ranks).clamp(max=self.num_places - 1)


class DrawnNodes:
    """Draws the nodes of one step's trees.

    rule: how they are drawn.
    shape: of all trees.
    budgets: the most nodes of each request, [b].
    numbers: what `DraftSampler.numbers` gives for `shape.num_nodes`. Node i is drawn with the uniform i.
    """

    def __init__(self, rule: DrawRule, shape: DrawnShape, budgets: Tensor, numbers: Tensor) -> None:
        self._rule, self._shape, self._numbers = rule, shape, numbers
        self._num_nodes = num_nodes = shape.num_nodes
        self.depth: int = len(shape.widest)
        self._widest = [*shape.widest, 0]
        self._widths = shape.widths[budgets.clamp(max=num_nodes)]  # [b, levels]
        self._drawn = torch.zeros_like(budgets)  # [b] nodes
        self._num_run = self._level = 0
        table = torch.full((len(budgets), num_nodes + 1), -1, device=budgets.device)  # the last column is for no node
        self._token_ids, self._parents = table, table.clone()
        self._parts: list[Tensor] = []  # [b, places, M], and a last row for no place
        self._new: Level

    def add(self, logits: Tensor, level: Level | None) -> None:
        """Draw the children of a level's nodes, from logits [b, w, D]; None: of the newest token, w = 1."""
        count, width, _ = logits.shape
        places = self._rule.drawing([self._numbers.repeat_interleave(width, dim=0)], self._num_nodes)
        assert isinstance(places, FilteredDrawing), "nodes are drawn from distributions"
        ids, probs, parts = places.distribution(logits.flatten(0, 1))
        self._report(level, places.reported(*parts), width)
        slots = self._slots(probs.view(count, width, -1) > 0, level)
        nodes = self._drawn[:, None] + torch.arange(slots.numbers.shape[1], device=ids.device)
        nodes = nodes.masked_fill(~slots.exist, self._num_nodes)
        uniforms = self._numbers.gather(1, nodes.clamp(max=self._num_nodes - 1))
        entries = slots.drawn(probs, uniforms.masked_fill(~places.sampled.view(count, width)[:, :1], 0.0))
        drawn = ids.view(count, width, -1)[torch.arange(count, device=ids.device)[:, None], slots.places, entries]
        self._keep(target_ids(drawn, self._rule.vocabulary), nodes, slots, level)

    def _slots(self, possible: Tensor, level: Level | None) -> Slots:
        """The most likely ones, as many as each request's level has. possible: [b, w, M], what can be drawn."""
        _, width, num_entries = possible.shape
        num_ranks = min(len(RATES), num_entries, self._widest[self._level])
        rates = self._shape.rates[:num_ranks] * possible[:, :, :num_ranks]
        scores = (rates if level is None else rates * level.scores[:, :, None]).flatten(1)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self._widest[self._level]]
        beyond = torch.arange(order.shape[1], device=order.device) >= self._widths[:, self._level, None]
        none = beyond | (scores.gather(1, order) <= 0)
        numbers = order.masked_fill(none, scores.shape[1]).sort(dim=1).values
        return Slots(numbers, pad(scores, (0, 1)).gather(1, numbers), num_ranks, width)

    def _keep(self, token_ids: Tensor, nodes: Tensor, slots: Slots, level: Level | None) -> None:
        """Enter the nodes of a new level, by their numbers [b, n]."""
        parents = torch.full_like(nodes, -1) if level is None else level.nodes.gather(1, slots.places)
        above = parents if level is None else slots.places + self._num_run - level.nodes.shape[1]
        self._token_ids.scatter_(1, nodes, token_ids)
        self._parents.scatter_(1, nodes, parents)
        self._drawn = self._drawn + slots.exist.sum(dim=1)
        self._new, self._level = Level(token_ids, above, nodes, slots.scores), self._level + 1

    def next_level(self) -> Level:
        """The most likely nodes of the new ones: as many as may have children."""
        new, width = self._new, min(BEAM, self._widest[self._level])
        places = new.scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
        self._num_run += places.shape[1]
        return Level(*(each.gather(1, places) for each in (new.token_ids, new.above, new.nodes, new.scores)))

    def _report(self, level: Level | None, parts: Sequence[Tensor], width: int) -> None:
        """Keep the distributions [b * w, M] of a level's places."""
        if level is None:
            self._parts = [each.new_zeros(len(each), self._num_nodes + 1, each.shape[1]) for each in parts]
        count = len(self._drawn)
        places = torch.zeros_like(self._drawn)[:, None] if level is None else level.nodes + 1
        rows = torch.arange(count, device=places.device)[:, None]
        for whole, part in zip(self._parts, parts, strict=True):
            whole[rows, places.clamp(max=self._num_nodes)] = part.view(count, width, -1)

    def result(self) -> tuple[Tensor, ...]:
        """Token ids and parents [b, n] of the nodes, -1 where is none; distributions of places [b, n, ...]."""
        found = (self._token_ids, self._parents, *self._parts)
        return tuple(each[:, : self._num_nodes] for each in found)
