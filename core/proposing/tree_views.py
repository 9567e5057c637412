"""What a proposer of trees is shown: kept rows are the accepted path, a chain again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..request.request import Committed


def kept_places(committed: Sequence[Committed]) -> list[int]:
    """The places in the batch of the rows that survived, request by request."""
    places: list[int] = []
    for each in committed:
        num_before = each.num_rows - each.num_drafted  # rows of committed tokens
        places += range(each.first_token, each.first_token + min(num_before, each.num_kept))
        first_node = each.first_token + num_before
        places += [first_node + node for node in _nodes(each)[: max(each.num_kept - num_before, 0)]]
    return places


def accepted_nodes(committed: Sequence[Committed], width: int) -> Tensor:
    """[B, width] int64 of each request, padded with -1."""
    table = torch.full((len(committed), width), -1)
    for b, each in enumerate(committed):
        nodes = _nodes(each)[: each.num_accepted]
        table[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
    return table


def _nodes(each: Committed) -> Sequence[int]:
    return range(each.num_drafted) if each.accepted_nodes is None else each.accepted_nodes
