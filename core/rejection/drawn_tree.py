"""Verification of trees whose nodes were drawn from reported distributions.

A place has a weight w, the probability that it may still accept, and a sub-distribution R of mass w: what the target
wants there beyond what its children gave. At first R = w p. A child x, drawn from q, gets the weight min(1, R(x)/q(x)).
If it fails, the place goes on with R <- (R - q)+ / (M + 1 - w), where M is the mass of (R - q)+; the mass of R is again
the place's weight. Where all children failed, the place accepts with probability w, and emits a token drawn from R.

* Together (traversal verification, arXiv 2505.12398) a place is decided when all below it have failed. On a chain this
  is block verification.
* One after the other (multi-round rejection, arXiv 2305.09781, 2402.12374) a child is decided at once: it has the
  weight 1 or is left. On a chain this is the standard rule.

Siblings are drawn without replacement unless the draft says otherwise: earlier ones are taken out of q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.pick import cumulate, pick
from ..kernels.row_distribution import RowDistribution
from .ratio import DistributionTable
from .types import DraftRows, Uniforms


@dataclass(frozen=True)
class Tree:
    """The nodes of a request. Place 0 is the newest token and place i + 1 is node i."""

    token_ids: list[int]
    parents: list[int]
    children: list[list[int]]  # of each place, in the order of the draw

    @classmethod
    def of(cls, token_ids: list[int], parents: Sequence[int]) -> Tree:
        children: list[list[int]] = [[] for _ in range(len(token_ids) + 1)]
        for node in range(len(token_ids)):
            children[parents[node] + 1].append(node)
        return cls(token_ids, list(parents[: len(token_ids)]), children)

    @cached_property
    def depths(self) -> list[int]:
        """Nodes on the path to each place."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent + 1] + 1)
        return found

    def child_with(self, place: int, token: int) -> int | None:
        """The first child of a place that has a token."""
        return next((node for node in self.children[place] if self.token_ids[node] == token), None)

    def emitted(self, ending: Ending) -> list[int]:
        """The tokens of an ending's path, and its last one."""
        return [*(self.token_ids[place - 1] for place in ending.path[1:]), ending.token]

    def without(self, bad: Sequence[bool]) -> Tree:
        """The same with no child below a bad place, on which nothing is accepted."""
        if not any(bad[: len(self.children)]):
            return self
        kept = [[] if spoilt else nodes for spoilt, nodes in zip(bad, self.children, strict=False)]
        return Tree(self.token_ids, self.parents, kept)


@dataclass(frozen=True)
class Ending:
    """Where a walk ended."""

    path: list[int]  # places from 0 on
    token: int  # emitted at the last of them; -1: the one that p gives there
    empty: bool = False  # the last child that failed there left no mass


@dataclass
class _Walk:
    """Where a request is in its tree: the path, and of each place on it what the rule keeps."""

    request: int
    tree: Tree
    path: list[int] = field(default_factory=lambda: [0])
    weights: list[float] = field(default_factory=lambda: [1.0])
    failed: list[int] = field(default_factory=lambda: [0])  # children that were tried, and taken out
    mass: list[float] = field(default_factory=lambda: [math.nan])  # of (R - q)+ of the last child that failed

    @property
    def untried(self) -> list[int]:
        """The children that have not failed; the first of them is the next to try, or being tried."""
        return self.tree.children[self.path[-1]][self.failed[-1] :]

    def descend(self, weight: float) -> None:
        self.path.append(self.untried[0] + 1)
        self.weights.append(weight)
        self.failed.append(0)
        self.mass.append(math.nan)

    def go_back(self) -> None:
        for each in (self.path, self.weights, self.failed, self.mass):
            each.pop()


class DrawnTrees:
    """Walks those drawn trees of a batch side by side whose distributions have one form.

    Down a tree a walk compares two numbers for each node. The vocabulary is passed over where a child has failed, and
    where what its place has left can still matter.
    """

    def __init__(
        self,
        distribution: RowDistribution,
        rows: Tensor,  # [B, K + 1] the row of each place
        table: DistributionTable,
        uniforms: Uniforms,
        drafts: DraftRows,
        *,
        together: bool,
    ) -> None:
        assert uniforms.accept is not None, "rows with a reported distribution need accept uniforms"
        assert drafts.distributions is not None
        assert drafts.parents is not None
        self._distribution, self._rows, self._table = distribution, rows, table
        self._output, self._accept = uniforms.output, uniforms.accept.tolist()
        self._replacement = (
            [] if drafts.distributions.replacement is None else drafts.distributions.replacement.tolist()
        )
        self._together = together
        places = (drafts.parents + 1).clamp(0, drafts.token_ids.shape[1] - 1)
        token_ids = drafts.token_ids.clamp(0, distribution.vocab_size - 1)
        self._wanted: list[list[float]] = distribution.prob_of(rows.gather(1, places), drafts.token_ids).tolist()
        """p of each node's token at its parent, of a later child what its siblings left of it."""
        self._drawn: list[list[float]] = table.prob_of(token_ids, places).tolist()  # what it was drawn with
        self._left: Tensor  # [walks, levels, tiles, width], R of each place on the path; of the last one alone

    def run(self, trees: Sequence[tuple[int, Tree]]) -> list[Ending]:
        """An ending for each (request, tree)."""
        walks = [_Walk(*each) for each in trees]
        levels = max((max(walk.tree.depths) for walk in walks), default=0) if self._together else 1
        weights = self._distribution.weights
        self._left = weights.new_empty(len(walks), max(levels, 1), *weights.shape[1:])
        going = list(range(len(walks)))
        while going:
            going = [number for number in going if self._fails(walks[number])]
            if going:
                self._take_out(walks, going)
        return self._endings(walks)

    def _fails(self, walk: _Walk) -> bool:
        """Walk on until a child has failed that is to be taken out of what its place wants. False: until the end."""
        while True:
            weight = self._weight_of_next(walk) if walk.untried else 0.0
            if weight > 0:
                walk.descend(weight)
                continue
            if not walk.untried:
                if self._accepts(walk):
                    return False
                walk.go_back()
            if len(walk.untried) > 1 or self._accepts(walk):
                return True
            walk.failed[-1] += 1  # what the place has left is less than its weight, and that is not enough

    def _accepts(self, walk: _Walk) -> bool:
        """Whether the last place accepts with the weight that it has."""
        node = walk.path[-1] - 1
        return node < 0 or self._accept[walk.request][node] < walk.weights[-1]

    def _weight_of_next(self, walk: _Walk) -> float:
        """The weight that the next child starts with; 0: it has failed."""
        node = walk.untried[0]
        p, q = self._wanted[walk.request][node], self._drawn[walk.request][node]
        p = p if walk.failed[-1] else p * walk.weights[-1]
        accept = min(1.0, p / q) if p > 0 and q > 0 else 0.0
        if self._together:
            return accept
        return 1.0 if accept >= 1 or (accept > 0 and self._accept[walk.request][node] * q < p) else 0.0

    def _levels(self, walks: Sequence[_Walk]) -> list[int]:
        return [len(walk.path) - 1 if self._together else 0 for walk in walks]

    def _take_out(self, walks: Sequence[_Walk], going: Sequence[int]) -> None:
        """Take the failed child of each of these walks out of what its place wants, and look at the next one."""
        active = [walks[number] for number in going]
        left, given = self._left_at(active, going), self._given(active)
        left.flatten(1)[:, : self._distribution.vocab_size].sub_(given)
        mass = cumulate(left.clamp_(min=0.0))[:, -1]
        weight = torch.tensor([walk.weights[-1] for walk in active], dtype=torch.float64, device=left.device)
        rest = mass + (1.0 - weight)
        left.div_(rest.to(left.dtype).view(-1, 1, 1))
        self._left[going, self._levels(active)] = left
        numbers = zip(active, mass.tolist(), (mass / rest).tolist(), left.flatten(1), given, strict=True)
        for walk, remains, weight_left, wanted, drawn in numbers:
            walk.mass[-1] = remains
            walk.failed[-1] += 1
            if self._together:
                walk.weights[-1] = weight_left if remains > 0 else 0.0
            if walk.untried:
                self._meet_next(walk, wanted, drawn)

    def _meet_next(self, walk: _Walk, wanted: Tensor, drawn: Tensor) -> None:
        """Look the next child up in what is left [V], and in what the one before was drawn from [V]."""
        node, tokens = walk.untried[0], walk.tree.token_ids
        if not 0 <= tokens[node] < len(drawn):
            return
        self._wanted[walk.request][node] = float(wanted[tokens[node]])
        if not self._puts_back(walk):
            drawn[self._tokens_failed(walk)] = 0.0
            self._drawn[walk.request][node] = float(drawn[tokens[node]] / drawn.sum(dtype=torch.float64))

    def _puts_back(self, walk: _Walk) -> bool:
        return bool(self._replacement) and self._replacement[walk.request]

    def _tokens_failed(self, walk: _Walk) -> list[int]:
        """The tokens of the children that have failed at the last place."""
        nodes = walk.tree.children[walk.path[-1]][: walk.failed[-1]]
        tokens = (walk.tree.token_ids[node] for node in nodes)
        return [token for token in tokens if 0 <= token < self._distribution.vocab_size]

    def _left_at(self, active: Sequence[_Walk], going: Sequence[int]) -> Tensor:
        """R of the last place of each walk: [n, tiles, width]."""
        left = self._left.new_empty(len(active), *self._left.shape[2:])
        fresh = [i for i, walk in enumerate(active) if not walk.failed[-1]]
        known = [i for i, walk in enumerate(active) if walk.failed[-1]]
        if fresh:
            rows = self._rows[[active[i].request for i in fresh], [active[i].path[-1] for i in fresh]]
            weights = torch.tensor([active[i].weights[-1] for i in fresh], dtype=left.dtype, device=left.device)
            left[fresh] = self._distribution.probs(rows).mul_(weights.view(-1, 1, 1))
        if known:
            left[known] = self._left[[going[i] for i in known], self._levels([active[i] for i in known])]
        return left

    def _given(self, active: Sequence[_Walk]) -> Tensor:
        """What the child of each walk that failed was drawn from: [n, V]."""
        device = self._rows.device
        requests = torch.tensor([walk.request for walk in active], device=device)
        places = torch.tensor([walk.path[-1] for walk in active], device=device)
        given = self._table.of(requests, places, self._distribution)
        for i, walk in enumerate(active):
            if walk.failed[-1] and not self._puts_back(walk):
                given[i, self._tokens_failed(walk)] = 0.0
                given[i] /= given[i].sum(dtype=torch.float64)
        return given

    def _endings(self, walks: Sequence[_Walk]) -> list[Ending]:
        """A place where a child failed emits from what it has left, any other from p."""
        drawn = [i for i, walk in enumerate(walks) if walk.mass[-1] > 0]
        tokens = dict.fromkeys(range(len(walks)), -1)
        if drawn:
            left = self._left[drawn, self._levels([walks[i] for i in drawn])]
            uniforms = self._output[[walks[i].request for i in drawn], [walks[i].path[-1] for i in drawn]]
            found = pick(left, cumulate(left), uniforms).clamp_(max=self._distribution.vocab_size - 1)
            tokens |= dict(zip(drawn, found.tolist(), strict=True))
        return [
            Ending(walk.path, tokens[i], empty=bool(walk.failed[-1]) and not walk.mass[-1] > 0)
            for i, walk in enumerate(walks)
        ]
