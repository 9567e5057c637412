"""Trees of drafts: building, growing, and drawing them.

A tree is a list of nodes (parent, token id) in the order in which they were drawn. A parent is the number of an earlier
node, or -1 for the newest token. In this order every prefix of a tree is a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ROOT",
    "Tree",
    "best_first",
    "branches",
    "depths",
    "draw_siblings",
    "path_to",
    "rerank",
    "shape_of_rates",
    "tree_of_paths",
]

State = TypeVar("State")
Tree = list[tuple[int, int]]
ROOT = -1


def tree_of_paths(paths: Iterable[Sequence[int]]) -> Tree:
    """Merge several continuations into a tree: paths that begin alike share the nodes of their beginning.

    paths: token ids from the newest token on, the most likely path first.

    Merging is lossless for one-hot drafts only.
    """
    known: dict[tuple[int, int], int] = {}
    for path in paths:
        parent = ROOT
        for token in path:
            parent = known.setdefault((parent, token), len(known))
    return list(known)


def depths(parents: Sequence[int]) -> list[int]:
    """How many nodes lie on the path to each node, itself included: from 1 on."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root to a node, itself included; none to -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def branches(parents: Sequence[int]) -> list[list[int]]:
    """The tree as chains of nodes: a chain goes on with a node's first child, and each other child begins one.

    Each node is in one chain. Chains come in the order of their first nodes.
    """
    found: list[list[int]] = []
    ends: dict[int, list[int]] = {ROOT: []}  # by the node that nothing has gone on from
    for node, parent in enumerate(parents):
        branch = ends.pop(parent, None)
        if not branch:
            branch = []
            found.append(branch)
        branch.append(node)
        ends[node] = branch
    return found


def best_first(
    children: Callable[[State], Iterable[tuple[int, float, State]]], root: State, num_nodes: int, max_depth: int
) -> tuple[Tree, list[float]]:
    """The most likely nodes of a tree by the product of probabilities on their path, the most likely first.

    Returns the tree, and this product for each node: its score, which `rerank` takes.

    children: what may follow a state: (token id, probability, state after it), the most likely first. It is asked once
        for each state that is reached, and no further than needed.
    root: the state after the newest token.

    The sum of these products bounds the accepted drafts of every lossless rule, and the rule for one-hot trees attains
    it. So this tree is the best one of its size. The methods of arXiv 2406.16858 and
    2604.12989 grow such trees.
    """
    tree: Tree = []
    scores: list[float] = []
    waiting: list[tuple[float, int, int, int, float, int, State, Iterator[tuple[int, float, State]]]] = []
    number = count()  # of equally likely nodes the one that was found first

    def wait(parent: int, depth: int, above: float, siblings: Iterator[tuple[int, float, State]]) -> None:
        found = next(siblings, None)
        if found is not None:
            token, probability, state = found
            heapq.heappush(waiting, (-above * probability, next(number), parent, depth, above, token, state, siblings))

    wait(ROOT, 1, 1.0, iter(children(root)))
    while waiting and len(tree) < num_nodes:
        score, _, parent, depth, above, token, state, siblings = heapq.heappop(waiting)
        tree.append((parent, token))
        scores.append(-score)
        wait(parent, depth, above, siblings)
        if depth < max_depth:
            wait(len(tree) - 1, depth + 1, -score, iter(children(state)))
    return tree, scores


def rerank(tree: Tree, scores: Sequence[float], num_nodes: int) -> Tree:
    """The nodes with the largest scores, each with all nodes above it, the largest score first.

    scores: cumulative probabilities, so that no node has more than its parent.

    Dropping nodes by what was drawn is lossless for one-hot drafts only.
    """
    order = sorted(range(len(tree)), key=lambda node: -scores[node])[:num_nodes]  # of equals the first comes first
    place = {node: number for number, node in enumerate(order)} | {ROOT: ROOT}
    return [(place[tree[node][0]], tree[node][1]) for node in order]


def shape_of_rates(rates: Sequence[float], num_nodes: int, max_depth: int) -> Tree:
    """A static tree for drawn drafts, by rank instead of token: (parent, rank among its siblings) of each node.

    rates: how often the sibling of each rank is accepted where it is reached. The tree is the best one of its size, as
    in Sequoia (arXiv 2402.12374).
    """
    ranked = list(enumerate(rates))
    shape, _ = best_first(lambda _: ((rank, rate, None) for rank, rate in ranked), None, num_nodes, max_depth)
    return shape


def draw_siblings(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Entries drawn one after the other from each row, none twice: [b, n] int64, -1 where the row has no more.

    probs: [b, M], not negative; each draw is from what the earlier ones leave.
    uniforms: [b, n] in (0, 1), one for each draw.
    """
    import torch

    left, drawn = probs.double().clone(), []
    for uniform in uniforms.unbind(1):
        mass = left.cumsum(1)
        entry = (mass <= uniform[:, None] * mass[:, -1:]).sum(1).clamp(max=left.shape[1] - 1)
        empty = mass[:, -1] <= 0
        drawn.append(entry.masked_fill(empty, -1))
        left.scatter_(1, entry[:, None], 0.0)
    return torch.stack(drawn, dim=1)
