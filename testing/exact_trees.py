"""The exact distribution of what verification makes of drawn trees: every draw and every decision, enumerated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specdec.core.host import rejection

from .rejection.reference import draft_distribution
from .rejection.tree_reference import Nodes, TreeRule, left_of, outcomes
from .small_drafter import Prefix, SmallDrafter

Target = Callable[[Prefix], Tensor]
"""The distribution [V] after a prefix."""


def tree_variation(drafter: SmallDrafter, rule: TreeRule, target: Target) -> float:
    """The total variation between the next tokens under a rule and those of the target alone.

    The rule is read from the specification, to which tests hold the verifier. What it is told of a tree is what the
    engine's own store gives.
    """
    trees = [(drafter.verified(tokens), prob) for tokens, prob in _trees(drafter, (), 1.0)]
    drafts = torch.tensor([[*tokens, *[0] * (drafter.num_drafts - len(tokens))] for tokens, _ in trees])
    reported = drafter.report(drafts).distributions
    length = drafter.num_drafts + 1
    found = torch.zeros([drafter.vocab_size] * length, dtype=torch.float64)
    for number, (tokens, prob) in enumerate(trees):
        nodes = _nodes(drafter, tokens, number, reported, target)
        for place, token, chance in outcomes(rule, nodes):
            output = (*(tokens[above - 1] for above in nodes.path(place)[1:]), token)
            found[output] += prob * chance * _continued(target, output, length)
    return float((found - _continued(target, (), length)).abs().sum()) / 2


def _trees(drafter: SmallDrafter, tokens: Prefix, prob: float) -> Iterator[tuple[Prefix, float]]:
    """Every tree that may be drawn, with its probability."""
    node = drafter.nodes.get(tokens)
    if node is None:
        yield tokens, prob
        return
    for token in node.drawn.nonzero()[:, 0].tolist():
        yield from _trees(drafter, (*tokens, token), prob * float(node.drawn[token]))


def _nodes(
    drafter: SmallDrafter,
    tokens: Prefix,
    number: int,
    reported: rejection.DraftDistributions | None,
    target: Target,
) -> Nodes:
    parents = drafter.parents(tokens) or []
    bare = Nodes(parents, list(tokens), [], [])
    paths = [bare.path(place)[1:] for place in range(len(tokens) + 1)]
    p = [target(tuple(tokens[above - 1] for above in path)) for path in paths]
    q = [_drawn_from(reported, number, node, parents, tokens, drafter.vocab_size) for node in range(len(tokens))]
    return Nodes(parents, list(tokens), p, q)


def _drawn_from(
    reported: rejection.DraftDistributions | None,
    number: int,
    node: int,
    parents: Sequence[int],
    tokens: Prefix,
    vocab_size: int,
) -> Tensor:
    """What a node was drawn from, as the verifier takes it: one-hot where nothing was reported."""
    q = None if reported is None else draft_distribution(reported, number, parents[node] + 1, vocab_size)
    if reported is None or q is None:
        return torch.nn.functional.one_hot(torch.tensor(tokens[node]), vocab_size).double()
    if reported.replacement is not None and bool(reported.replacement[number]):
        return q
    return left_of(q, [tokens[other] for other in range(node) if parents[other] == parents[node]])


def _continued(target: Target, prefix: Prefix, length: int) -> Tensor:
    """The distribution of what follows a prefix, up to a whole length: [V, ..., V]."""
    if len(prefix) == length:
        return torch.ones((), dtype=torch.float64)
    p = target(prefix)
    return torch.stack([p[token] * _continued(target, (*prefix, token), length) for token in range(len(p))])
