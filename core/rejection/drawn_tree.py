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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.pick import cumulate, pick
from ..kernels.row_distribution import RowDistribution
from .ratio import DistributionTable
from .types import DistributionKind, DraftRows, Uniforms


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
    kind: DistributionKind
    path: list[int] = field(default_factory=lambda: [0])
    weights: list[float] = field(default_factory=lambda: [1.0])
    tried: list[int] = field(default_factory=lambda: [0])  # children that were
    mass: list[float] = field(default_factory=lambda: [math.nan])  # of (R - q)+ of the last child that failed

    @property
    def node(self) -> int:
        """The next child to try."""
        return self.tree.children[self.path[-1]][self.tried[-1]]

    def descend(self, weight: float) -> None:
        self.path.append(self.node + 1)
        self.weights.append(weight)
        self.tried.append(0)
        self.mass.append(math.nan)

    def go_back(self) -> None:
        for each in (self.path, self.weights, self.tried, self.mass):
            each.pop()


class DrawnTrees:
    """Walks the drawn trees of one batch side by side."""

    def __init__(
        self,
        distribution: RowDistribution,
        rows: Tensor,  # [B, K + 1] the row of each place
        tables: Mapping[DistributionKind, DistributionTable],
        uniforms: Uniforms,
        drafts: DraftRows,
        *,
        together: bool,
    ) -> None:
        assert uniforms.accept is not None, "rows with a reported distribution need accept uniforms"
        assert drafts.distributions is not None
        self._distribution, self._rows, self._tables = distribution, rows, tables
        self._output, self._accept = uniforms.output, uniforms.accept.tolist()
        self._replacement = (
            [] if drafts.distributions.replacement is None else drafts.distributions.replacement.tolist()
        )
        self._together = together
        self._left: Tensor  # [walks, levels, tiles * width], R of each place on the path; of the last one alone

    def run(self, trees: Sequence[tuple[int, Tree, DistributionKind]]) -> list[Ending]:
        """An ending for each (request, tree, kind of its distribution)."""
        walks = [_Walk(*each) for each in trees]
        levels = max((max(walk.tree.depths) for walk in walks), default=0) if self._together else 1
        weights = self._distribution.weights
        self._left = weights.new_empty(len(walks), max(levels, 1), weights[0].numel())
        going = list(range(len(walks)))
        while going:
            going = [number for number in going if self._has_child_to_try(walks[number])]
            self._try_next(walks, going)
        return self._endings(walks)

    def _has_child_to_try(self, walk: _Walk) -> bool:
        """Go back from places that do not accept. False where one does."""
        while walk.tried[-1] == len(walk.tree.children[walk.path[-1]]):
            node = walk.path[-1] - 1
            if node < 0 or self._accept[walk.request][node] < walk.weights[-1]:
                return False
            walk.go_back()
        return True

    def _level(self, walk: _Walk) -> int:
        return len(walk.path) - 1 if self._together else 0

    def _try_next(self, walks: Sequence[_Walk], going: Sequence[int]) -> None:
        """Try one child of each walk: its weight, and what the place has left if it fails."""
        if not going:
            return
        active = [walks[number] for number in going]
        left = self._wanted(active, going)
        given = self._given(active)
        vocab_size = self._distribution.vocab_size
        tokens = torch.tensor([walk.tree.token_ids[walk.node] for walk in active], device=left.device)
        known = ((tokens >= 0) & (tokens < vocab_size)).tolist()
        entry = tokens.clamp(0, vocab_size - 1).unsqueeze(1)
        wanted, drawn = (each.gather(1, entry).squeeze(1).tolist() for each in (left, given))
        left[:, :vocab_size] -= given
        left.clamp_(min=0.0)
        mass = left.sum(1, dtype=torch.float64)
        weight = torch.tensor([walk.weights[-1] for walk in active], dtype=torch.float64, device=left.device)
        rest = mass + (1.0 - weight)
        left.div_(rest.to(left.dtype).unsqueeze(1))
        left.masked_fill_(~(mass > 0).unsqueeze(1), 0.0)
        self._left[going, [self._level(walk) for walk in active]] = left
        numbers = zip(active, wanted, drawn, known, mass.tolist(), (mass / rest).tolist(), strict=True)
        for walk, p, q, is_token, remains, weight_left in numbers:
            self._decide(walk, p if is_token else 0.0, q, remains, weight_left)

    def _decide(self, walk: _Walk, p: float, q: float, mass: float, weight: float) -> None:
        """p: what the place wants of the child's token, q: what it was drawn with."""
        node = walk.node
        accept = min(1.0, p / q) if p > 0 and q > 0 else 0.0
        walk.mass[-1] = mass
        if self._together:
            walk.weights[-1] = weight if mass > 0 else 0.0
            goes_down, accept = accept > 0, accept
        else:
            goes_down = accept >= 1 or (accept > 0 and self._accept[walk.request][node] * q < p)
            accept = 1.0
        if goes_down:
            walk.descend(accept)
            walk.tried[-2] += 1
        else:
            walk.tried[-1] += 1

    def _wanted(self, active: Sequence[_Walk], going: Sequence[int]) -> Tensor:
        """R of the last place of each walk: [n, tiles * width]."""
        left = self._left[list(going), [self._level(walk) for walk in active]]
        fresh = [i for i, walk in enumerate(active) if not walk.tried[-1]]
        if fresh:
            rows = self._rows[[active[i].request for i in fresh], [active[i].path[-1] for i in fresh]]
            weights = torch.tensor([active[i].weights[-1] for i in fresh], dtype=left.dtype, device=left.device)
            left[fresh] = self._distribution.probs(rows).flatten(1).mul_(weights.unsqueeze(1))
        return left

    def _given(self, active: Sequence[_Walk]) -> Tensor:
        """What the next child of each walk was drawn from: [n, V]."""
        weights = self._distribution.weights
        given = weights.new_zeros(len(active), self._distribution.vocab_size)
        device = given.device
        for kind in {walk.kind for walk in active}:
            chosen = [i for i, walk in enumerate(active) if walk.kind == kind]
            requests = torch.tensor([active[i].request for i in chosen], device=device)
            places = torch.tensor([active[i].path[-1] for i in chosen], device=device)
            part = weights.new_zeros(len(chosen), self._distribution.vocab_size)
            self._tables[kind].subtract(part, requests, places)
            given[chosen] = part.neg_()
        for i, walk in enumerate(active):
            if walk.tried[-1] and not (self._replacement and self._replacement[walk.request]):
                earlier = walk.tree.children[walk.path[-1]][: walk.tried[-1]]
                tried = (walk.tree.token_ids[node] for node in earlier)
                given[i, [token for token in tried if 0 <= token < given.shape[1]]] = 0.0
                given[i] /= given[i].sum(dtype=torch.float64)
        return given

    def _endings(self, walks: Sequence[_Walk]) -> list[Ending]:
        """A place where a child failed emits from what it has left, any other from p."""
        drawn = [i for i, walk in enumerate(walks) if walk.mass[-1] > 0]
        tokens = dict.fromkeys(range(len(walks)), -1)
        if drawn:
            left = self._left[drawn, [self._level(walks[i]) for i in drawn]].view(
                len(drawn), *self._distribution.weights.shape[1:]
            )
            uniforms = self._output[[walks[i].request for i in drawn], [walks[i].path[-1] for i in drawn]]
            found = pick(left, cumulate(left), uniforms).clamp_(max=self._distribution.vocab_size - 1)
            tokens |= dict(zip(drawn, found.tolist(), strict=True))
        return [
            Ending(walk.path, tokens[i], empty=bool(walk.tried[-1]) and not walk.mass[-1] > 0)
            for i, walk in enumerate(walks)
        ]
