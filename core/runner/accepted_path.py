"""What the host makes of the paths that were accepted in trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..request.request import Request
from ..request.verified_tree import VerifiedTree

if TYPE_CHECKING:
    from .batch import Batch


def accepted_paths(batch: Batch, path: Sequence[Sequence[int]]) -> list[VerifiedTree]:
    """Of each request; path [B, K + 1] of a verdict."""
    assert batch.taken.parents is not None, "trees were verified"
    nodes = [[place - 1 for place in places if place > 0] for places in path]
    return [VerifiedTree(*each) for each in zip(nodes, batch.taken.parents, strict=True)]


def on_path(logprobs: Mapping[str, Tensor], requests: Sequence[Request], path: Tensor) -> dict[str, Tensor]:
    """Of each request's log-probabilities [n, V] by place, those of the places on its path [B, K + 1], then any."""
    places = {request.request_id: each for request, each in zip(requests, path.clamp(min=0), strict=True)}
    return {name: rows[places[name][: len(rows)]] for name, rows in logprobs.items()}
