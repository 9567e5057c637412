"""What the host makes of the paths that were accepted in trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from specdec.sdk.trees import depths

from ..request.request import Request

if TYPE_CHECKING:
    from .batch import Batch


def accepted_paths(batch: Batch, path: Sequence[Sequence[int]]) -> list[AcceptedPath]:
    """Of each request; path [B, K + 1] of a verdict."""
    assert batch.taken.parents is not None, "trees were verified"
    nodes = [[place - 1 for place in places if place > 0] for places in path]
    return [AcceptedPath(*each) for each in zip(nodes, batch.taken.parents, strict=True)]


class AcceptedPath(NamedTuple):
    """What was accepted in one request's tree."""

    nodes: list[int]  # from the root on
    parents: Sequence[int]  # of all nodes

    @property
    def depth(self) -> int:
        """Of the whole tree."""
        return max(depths(self.parents), default=0)

    def path_first(self, drafts: Sequence[int]) -> list[int]:
        """The tokens of all nodes: the path, then what was met at its end, then the others in the order of the draw."""
        end = self.nodes[-1] if self.nodes else -1
        met = [node for node, parent in enumerate(self.parents) if parent == end]
        first = [*self.nodes, *met]
        return [drafts[node] for node in dict.fromkeys([*first, *range(len(drafts))])]


def on_path(logprobs: Mapping[str, Tensor], requests: Sequence[Request], path: Tensor) -> dict[str, Tensor]:
    """Of each request's log-probabilities [n, V] by place, those of the places on its path [B, K + 1], then any."""
    places = {request.request_id: each for request, each in zip(requests, path.clamp(min=0), strict=True)}
    return {name: rows[places[name][: len(rows)]] for name, rows in logprobs.items()}
