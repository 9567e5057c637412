"""The memory that verification on a device works in, allocated once so that a call allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from .launch import TILE
from .verdict import DenseLogits, Outputs, Rows, Scratch


@dataclass(frozen=True)
class Workspace:
    """Flat buffers, of which each call uses the front; a verdict made in them is valid until the next call.

    Its size is fixed at `plan`, so that a captured graph may be launched again. Arrival counters are zeroed once: every
    launch leaves them at zero.
    """

    tile: int  # logits per tile
    max_requests: int
    max_drafts: int
    maxima: Tensor  # float32
    sums: Tensor  # float32
    draft_maxima: Tensor  # float32
    draft_sums: Tensor  # float32
    cutoff: Tensor  # float32
    residual: Tensor  # float32
    counter: Tensor  # int32
    token_ids: Tensor  # int64
    path: Tensor  # int64
    num_accepted: Tensor  # int64
    status: Tensor  # int64

    @classmethod
    def plan(
        cls,
        max_requests: int,
        max_drafts: int,
        vocab_size: int,
        device: torch.device,
        draft_vocab_size: int = 0,
        tile: int = TILE,
    ) -> Workspace:
        """Room for max_requests requests of max_drafts drafts; draft_vocab_size > 0 if distributions come as logits."""
        places = max_requests * (max_drafts + 1)
        tiles, draft_tiles = -(-vocab_size // tile), -(-draft_vocab_size // tile)
        floats, integers = (partial(torch.empty, dtype=each, device=device) for each in (torch.float32, torch.int64))
        return cls(
            tile=tile,
            max_requests=max_requests,
            max_drafts=max_drafts,
            maxima=floats(places * tiles),
            sums=floats(places * tiles),
            draft_maxima=floats(max_requests * max_drafts * draft_tiles),
            draft_sums=floats(max_requests * max_drafts * draft_tiles),
            cutoff=floats(places),
            residual=floats(places * tiles),
            counter=torch.zeros(max_requests, dtype=torch.int32, device=device),
            token_ids=integers(places),
            path=integers(places),
            num_accepted=integers(max_requests),
            status=integers(max_requests),
        )

    def rows(self, logits: Tensor, num_requests: int, num_places: int) -> Rows:
        """The target's rows [R, V] with room for their statistics; nothing is cut off."""
        vocab_size, num_tiles = logits.shape[1], -(-logits.shape[1] // self.tile)
        maxima, sums = (_front(each, num_requests, num_places, num_tiles) for each in (self.maxima, self.sums))
        return Rows(logits, logits.stride(0), maxima, sums, None, vocab_size, num_tiles)

    def draft_logits(self, table: Tensor) -> DenseLogits:
        """Draft distributions given as logits [B, K, Vd] with room for their statistics."""
        size, num_tiles = table.shape[2], -(-table.shape[2] // self.tile)
        maxima, sums = (_front(each, *table.shape[:2], num_tiles) for each in (self.draft_maxima, self.draft_sums))
        return DenseLogits(table, size, maxima, sums, num_tiles)

    def scratch(self, rows: Rows) -> Scratch:
        """What the programs of a request share."""
        return Scratch(_front(self.residual, *rows.maxima.shape), _front(self.counter, len(rows.maxima)))

    def outputs(self, num_requests: int, num_drafts: int, *, trees: bool) -> Outputs:
        """Where the verdict goes; trees have paths."""
        return Outputs(
            token_ids=_front(self.token_ids, num_requests, num_drafts + 1),
            num_accepted=_front(self.num_accepted, num_requests),
            status=_front(self.status, num_requests),
            path=_front(self.path, num_requests, num_drafts + 1) if trees else None,
        )


def _front(buffer: Tensor, *shape: int) -> Tensor:
    """The front of a flat buffer in a shape; ValueError where the plan was for less."""
    count = prod(shape)
    if count > len(buffer):
        raise ValueError(
            f"the workspace holds {len(buffer)} elements where {list(shape)} are needed; plan a larger one"
        )
    return buffer[:count].view(shape)
