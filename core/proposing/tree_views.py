"""What a proposer of trees is shown: kept tokens are the accepted path, a chain again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.sdk.trees import depths

if TYPE_CHECKING:
    from ..request.request import Committed


def kept_places(committed: Sequence[Committed]) -> list[int]:
    """The places in the batch of the rows that survived, request by request."""
    places: list[int] = []
    for each in committed:
        num_before = each.num_rows if each.tree is None else each.num_rows - each.num_drafted  # rows of no tree
        places += range(each.first_token, each.first_token + min(num_before, each.num_kept))
        first_node = each.first_token + num_before
        places += [first_node + node for node in each.accepted_nodes[: max(each.num_kept - num_before, 0)]]
    return places


def kept_first(committed: Sequence[Committed]) -> list[int]:
    """The places in the batch of all rows, of each request those that survived before the others."""
    places: list[int] = []
    for each in committed:
        every = range(each.first_token, each.first_token + each.num_rows)
        places += every if each.tree is None else dict.fromkeys([*kept_places([each]), *every])
    return places


def accepted_nodes(committed: Sequence[Committed], width: int) -> list[int]:
    """[B, width] of each request, padded with -1."""
    table: list[int] = []
    for each in committed:
        nodes = each.accepted_nodes[: each.num_accepted]
        table += [*nodes, *[-1] * (width - len(nodes))]
    return table


def rejected_places(each: Committed) -> tuple[Sequence[int], Sequence[int]]:
    """The places in the batch of a request's rejected drafts, and their positions, in the order of its drafts."""
    count = each.num_drafted - each.num_accepted
    first, position = each.first_token + each.num_kept, each.first_position + each.num_kept
    if each.tree is None:
        return range(first, first + count), range(position, position + count)
    num_before = each.num_rows - each.num_drafted
    nodes, depth = each.tree.path_first()[each.num_accepted :], depths(each.tree.parents)
    newest = each.first_position + num_before - 1
    return [each.first_token + num_before + node for node in nodes], [newest + depth[node] for node in nodes]
