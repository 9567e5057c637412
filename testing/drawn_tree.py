"""The distribution that drafts are really drawn from, measured to the last bit by choosing the random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sdk.types import DraftDistribution

from .moves import LONG, Move, Shown
from .report import Violation
from .stage import Stage

NUM_TWINS = 24
NUM_CELLS = 16
NUM_HALVINGS = 30
LEAST = 2.0**-40  # the first and the last number that are tried
PROMPT = (0, 1, 2, 3, 0, 1, 2, 0, 1)
SAMPLED = LONG.replace(temperature=1.0)

Prefix = tuple[int, ...]


def twins(stage: Stage, prompt: Sequence[int], uniforms: Tensor | None = None) -> Shown:
    """A step after which as many requests as there are uniforms [B, K], or rows, have the tokens of `prompt`; they
    end.
    """
    count = stage.num_free_rows if uniforms is None else len(uniforms)
    names = [f"twin-{stage.number}-{number}" for number in range(count)]
    for name in names:
        stage.add(name, prompt[:-1], SAMPLED)
    shown = stage.advance([Move(name, forced=prompt[-1]) for name in names], uniforms=uniforms)
    for name in names:
        stage.finish(name)
    return shown


@dataclass(frozen=True)
class Node:
    """What follows a prefix of drafts."""

    drawn: Tensor  # [V] float64, the distribution of the draw
    distribution: DraftDistribution | None  # what was reported, in its first row
    uniform: dict[int, float]  # a number that draws each token
    parent: int  # the earlier draft that it hangs from, -1: the newest token


class Tree:
    """Every draft that a proposer can draw after one text, with its probability: found by choosing the uniforms."""

    def __init__(self, stage: Stage, num_drafts: int) -> None:
        self._stage = stage
        self.num_drafts = num_drafts
        self.nodes: dict[Prefix, Node] = {}
        self._grow((), ())

    def parents(self, drafts: Prefix) -> list[int]:
        """Where each of the drafts hangs."""
        return [self.nodes[drafts[:i]].parent for i in range(len(drafts))]

    def draws(self, prefix: Prefix = (), prob: float = 1.0) -> Iterator[tuple[Prefix, float]]:
        """Every draft that begins with a prefix, with its probability."""
        node = self.nodes.get(prefix)
        if node is None:
            yield prefix, prob
            return
        for token in node.drawn.nonzero()[:, 0].tolist():
            yield from self.draws((*prefix, token), prob * float(node.drawn[token]))

    def _grow(self, prefix: Prefix, path: tuple[float, ...]) -> None:
        if len(prefix) == self.num_drafts:
            return
        node = self._node(path)
        if node is None:
            return
        self.nodes[prefix] = node
        for token, uniform in node.uniform.items():
            self._grow((*prefix, token), (*path, uniform))

    def _node(self, path: tuple[float, ...]) -> Node | None:
        """Measure the distribution after the drafts that `path` draws; None where nothing is drafted."""
        uniforms = [LEAST, *((cell + 0.5) / NUM_CELLS for cell in range(NUM_CELLS)), 1 - LEAST]
        shown = self._draw(path, uniforms)
        tokens = [self._token(shown, row, len(path)) for row in range(len(uniforms))]
        if set(tokens) == {None}:
            return None
        if None in tokens:
            raise Violation(
                expected="a draft at this position for every random number, or for none",
                found=f"drafts {shown.drafts[tokens.index(None)]} and others for the same text",
                where=shown.where,
                fix="decide whether to draft before drawing",
            )
        parent = self._parent(shown, len(path))
        drawn = torch.zeros(self._stage.info.vocab_size, dtype=torch.float64)
        low = 0.0
        for boundary, token in self._boundaries(path, uniforms, [int(token) for token in tokens if token is not None]):
            drawn[token] += boundary - low
            low = boundary
        uniform = {int(token): chosen for token, chosen in zip(tokens, uniforms, strict=True) if token is not None}
        return Node(drawn, shown.distribution, uniform, parent)

    def _boundaries(self, path: tuple[float, ...], points: list[float], tokens: list[int]) -> list[tuple[float, int]]:
        """Where the drawn token changes as its uniform grows, with the token drawn before each change; ends at 1."""
        found: list[tuple[float, int]] = []
        waiting = [pair for pair in zip(points, tokens, points[1:], tokens[1:], strict=False) if pair[1] != pair[3]]
        while waiting:
            low = torch.tensor([pair[0] for pair in waiting], dtype=torch.float64)
            high = torch.tensor([pair[2] for pair in waiting], dtype=torch.float64)
            first = [pair[1] for pair in waiting]
            behind = [pair[3] for pair in waiting]
            for _ in range(NUM_HALVINGS):
                middle = (low + high) / 2
                shown = self._draw(path, middle.tolist())
                now = [self._token(shown, row, len(path)) for row in range(len(waiting))]
                same = torch.tensor([token == known for token, known in zip(now, first, strict=True)])
                behind = [b if s else int(n or 0) for b, s, n in zip(behind, same.tolist(), now, strict=True)]
                low, high = torch.where(same, middle, low), torch.where(same, high, middle)
            found += zip(high.tolist(), first, strict=True)
            ends = zip(high.tolist(), behind, waiting, strict=True)
            waiting = [(at, token, pair[2], pair[3]) for at, token, pair in ends if token != pair[3]]
        return [*sorted(found), (1.0, tokens[-1])]

    def _draw(self, path: tuple[float, ...], uniforms: Sequence[float]) -> Shown:
        width = self._stage.host.views.width
        table = torch.full((len(uniforms), width), 0.5, dtype=torch.float64)
        table[:, : len(path)] = torch.tensor(path, dtype=torch.float64)
        table[:, len(path)] = torch.tensor(uniforms, dtype=torch.float64)
        return twins(self._stage, PROMPT, table)

    @staticmethod
    def _parent(shown: Shown, position: int) -> int:
        """Where the draft at a position hangs, whatever it is."""
        found = {parents[position] for parents in shown.parents}
        if len(found) > 1:
            raise Violation(
                expected=f"node {position} after the same node for every random number of its own",
                found=f"it hangs from the nodes {sorted(found)}, after the same {position} nodes",
                where=shown.where,
                fix="decide where to draw a node before drawing it, and leave no drawn node out",
            )
        return found.pop()

    @staticmethod
    def _token(shown: Shown, row: int, position: int) -> int | None:
        draft = shown.drafts[row]
        return draft[position] if len(draft) > position else None
