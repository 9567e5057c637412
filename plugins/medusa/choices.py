"""A static tree of the heads' choices (arXiv 2401.10774): each node is a path of ranks, one for each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from specdec.sdk import ProposerConfig, Refusal
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer import DraftVocabulary
from specdec.sdk.trees import ROOT

KEY = "medusa_choices"
Paths = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Choices:
    """The nodes of the tree, the best one first."""

    heads: Tensor  # [n] int64, that drafts each node
    ranks: Tensor  # [n] int64, among the head's most likely tokens
    parents: Tensor  # [n] int64
    num_ranks: int  # from 0 on, that occur

    @classmethod
    def of(cls, paths: Paths, num_nodes: int, max_depth: int, num_ids: int) -> Self:
        """The first `num_nodes` paths of at most `max_depth` ranks. Raises Refusal if they are no tree.

        num_ids: how many tokens a head chooses from.
        """
        known: dict[tuple[int, ...], int] = {(): ROOT}
        found: list[tuple[int, int, int]] = []
        for path in map(tuple, paths):
            if path[:-1] not in known or path in known or not 0 <= path[-1] < num_ids:
                reason = f"{KEY} has {list(path)} "
                reason += "twice" if path in known else f"and no {list(path[:-1])} before it, or ranks out of range"
                raise Refusal(reason, f"paths of ranks 0 .. {num_ids - 1}, each once and behind its own beginning")
            known[path] = len(found)
            if len(path) <= max_depth:
                found.append((len(path) - 1, path[-1], known[path[:-1]]))
        heads, ranks, parents = torch.tensor(found[:num_nodes]).unbind(1)
        return cls(heads, ranks, parents, 1 + int(ranks.max()))

    def tree(self, logits: Tensor, num_nodes: int, vocabulary: DraftVocabulary | None) -> tuple[Tensor, Tensor]:
        """Target ids and parents [b, n] of the first `num_nodes`, from the heads' logits [b, heads, D]."""
        ids = logits.topk(self.num_ranks).indices[:, self.heads[:num_nodes], self.ranks[:num_nodes]]
        parents = self.parents[:num_nodes].expand(len(logits), -1)
        return ids if vocabulary is None else vocabulary.target_ids[ids], parents


def choices_of(config: ProposerConfig, checkpoint: Checkpoint, num_ids: int) -> Choices | None:
    """The user's tree, else the checkpoint's. None: drafts are chains, or the tree follows the heads' probabilities.

    Raises Refusal for a tree where chains are asked for, and for one that is none.
    """
    asked: Paths | None = config.options.medusa_choices
    if config.max_nodes is None:
        if asked is not None:
            raise Refusal(f"{KEY} without max_nodes", f'"max_nodes": {min(len(asked), 64)}')
        return None
    paths = asked or checkpoint.get(KEY, list, None)
    return Choices.of(paths, config.max_nodes, config.num_draft_tokens, num_ids) if paths else None
