"""What follows from the path that was accepted in a tree: its keys and values move to where a chain has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache.addressing import Addressing
from ..cache.kv_cache import KVCache
from ..request.request import Request
from ..request.verified_tree import VerifiedTree

if TYPE_CHECKING:
    from .batch import Batch


def accepted_paths(batch: Batch, path: Tensor) -> list[VerifiedTree]:
    """Of each request; path [B, K + 1] of a verdict."""
    assert batch.taken.parents is not None, "trees were verified"
    nodes = [[place - 1 for place in places if place > 0] for places in path.tolist()]
    return [VerifiedTree(*each) for each in zip(nodes, batch.taken.parents, strict=True)]


def on_path(logprobs: Mapping[str, Tensor], requests: Sequence[Request], path: Tensor) -> dict[str, Tensor]:
    """Of each request's log-probabilities [n, V] by place, those of the places on its path [B, K + 1]."""
    places = {request.request_id: each for request, each in zip(requests, path, strict=True)}
    return {name: rows[places[name][places[name] >= 0]] for name, rows in logprobs.items()}


def move_into_place(batch: Batch, paths: Sequence[VerifiedTree], cache: KVCache, addressing: Addressing) -> None:
    """Put the keys and values of accepted nodes where those of a chain lie.

    A node lies at its number behind the newest token, and belongs at its depth. The first nodes of a tree that are a
    chain lie there already.
    """
    rows: list[int] = []
    sources: list[int] = []
    destinations: list[int] = []
    for item, path in zip(batch.items, paths, strict=True):
        first = item.scheduled.start + item.scheduled.num_tokens
        for depth, node in enumerate(path.nodes):
            if node != depth:
                rows.append(item.scheduled.request.row)
                sources.append(first + node)
                destinations.append(first + depth)
    if rows:
        of, at, to = (torch.tensor(each, device=cache.device) for each in (rows, sources, destinations))
        cache.move(addressing.slots(of, at), addressing.slots(of, to))
