"""The tokens of the requests that run, by row, for a proposer that reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..request.request import Committed


class TokenHistory:
    """One row of memory per row of the engine, to which each step adds what is new."""

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int64, device=device)
        self._memory = self.tokens.numpy().data.cast("B").cast("q") if device.type == "cpu" else None
        self._recorded = [(-1, 0)] * max_num_seqs  # by row: generation, tokens written

    def news(self, committed: Sequence[Committed]) -> tuple[list[int], list[int]]:
        """Places in the flat memory where tokens are missing, and the tokens. They count as written from now on."""
        width = self.tokens.shape[1]
        places: list[int] = []
        news: list[int] = []
        for each in committed:
            first = each.row * width
            start = self._written(each)
            places += range(first + start, first + each.length)
            news += each.request.token_ids[start : each.length]
        return places, news

    def put(self, places: Tensor, news: Tensor) -> None:
        """Write what `news` gave, once it is on the device."""
        self.tokens.view(-1).index_copy_(0, places, news)

    def write(self, committed: Sequence[Committed]) -> None:
        """Write what is new where the memory is the host's."""
        assert self._memory is not None, "a device is sent its news together with the view"
        width = self.tokens.shape[1]
        for each in committed:
            first, start = each.row * width, self._written(each)
            news = array("q", each.request.token_ids[start : each.length])
            self._memory[first + start : first + each.length] = news

    def _written(self, each: Committed) -> int:
        """How many tokens stand in the request's row; all of them do from now on."""
        generation, written = self._recorded[each.row]
        self._recorded[each.row] = (each.generation, each.length)
        return written if generation == each.generation else 0
