"""Trees of a network's most likely continuations, by the product of probabilities on their path (arXiv 2406.16858)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .vocabulary import DraftVocabulary, target_ids

BEAM = 8
"""Nodes of a level that the network runs, and children of each that may become nodes."""


@dataclass(frozen=True)
class Level:
    """The nodes that the network runs next: w per request, of the requests in a step that want drafts."""

    token_ids: Tensor  # [b, w] target ids
    above: Tensor  # [b, w] the earlier run node that each hangs from, -1: the newest token
    nodes: Tensor  # [b, w] places among the candidates
    scores: Tensor  # [b, w] float32, log of the product of probabilities


class Candidates:
    """All nodes that a tree may have. A child's score is never above its parent's, so the best ones are a tree."""

    def __init__(self, vocabulary: DraftVocabulary | None, num_nodes: int, depth: int) -> None:
        self.num_nodes: int = num_nodes
        self.depth: int = min(depth, num_nodes)
        self._vocabulary = vocabulary
        self._num_run = 0
        self._columns: list[tuple[Tensor, ...]] = []  # token ids, parents, scores: [b, w * children] by level

    def add(self, logits: Tensor, level: Level | None) -> None:
        """The most likely children of a level's nodes, from logits [b, w, D]; None: of the newest token, w = 1."""
        count, width, _ = logits.shape
        scores, ids = logits.float().log_softmax(-1).topk(min(BEAM, logits.shape[2]))
        parents = torch.full_like(ids, -1)
        if level is not None:
            scores = scores + level.scores[:, :, None]
            parents = level.nodes[:, :, None].expand_as(ids)
        columns = target_ids(ids, self._vocabulary), parents, scores
        self._columns.append(tuple(each.reshape(count, -1) for each in columns))
        self._num_children, self._first_run = ids.shape[2], self._num_run - width  # -1: the newest token

    def next_level(self) -> Level:
        """The most likely nodes of the last level: those that can have a child in the tree."""
        tokens, _, scores = self._columns[-1]
        first = sum(each[0].shape[1] for each in self._columns[:-1])
        scores, places = scores.topk(min(BEAM, self.num_nodes - 1, scores.shape[1]))
        self._num_run += scores.shape[1]
        above = self._first_run + places // self._num_children
        return Level(tokens.gather(1, places), above, places + first, scores)

    def result(self) -> tuple[Tensor, ...]:
        """Token ids and parents [b, n] of the most likely nodes, the best first."""
        return _likeliest(self._columns, self.num_nodes)


def tree_of_positions(logits: Tensor, num_nodes: int, vocabulary: DraftVocabulary | None) -> tuple[Tensor, ...]:
    """The most likely nodes where each depth has a distribution of its own, whatever its parent (arXiv 2604.12989).

    logits: [b, depth, D]. Returns token ids and parents [b, num_nodes]. There are as many nodes, as the first position
    alone has so many candidates.
    """
    scores, ids = logits.float().log_softmax(-1).topk(min(num_nodes, logits.shape[2]))
    tokens, most = target_ids(ids, vocabulary), ids.shape[2]
    columns = [(tokens[:, 0], torch.full_like(ids[:, 0], -1), scores[:, 0])]
    for depth in range(1, logits.shape[1]):  # no other node of a level has a child among the most likely nodes
        level, places = (columns[-1][2][:, :, None] + scores[:, depth, None]).flatten(1).topk(most)
        above = places.div(most, rounding_mode="floor") + (depth - 1) * most
        columns.append((tokens[:, depth].gather(1, places % most), above, level))
    return _likeliest(columns, num_nodes)


def _likeliest(columns: Sequence[tuple[Tensor, ...]], num_nodes: int) -> tuple[Tensor, ...]:
    """Token ids and parents [b, num_nodes] of the nodes with the largest scores, of those of all levels.

    columns: token ids, parents and scores [b, n] of each level. A parent's number counts all levels.
    """
    tokens, parents, scores = (torch.cat(each, dim=1) for each in zip(*columns, strict=True))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
    place = torch.full_like(parents, -1)
    place.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    above = parents.gather(1, order)
    above = place.gather(1, above.clamp(min=0)).masked_fill(above < 0, -1)
    return tokens.gather(1, order), above
