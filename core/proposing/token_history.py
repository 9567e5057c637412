"""The tokens of the requests of a step, for a proposer that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.sdk.types import PADDING_TOKEN_ID

from ..request.request import Committed


@dataclass(frozen=True)
class HostHistory:
    """Read where the engine keeps them: from each request's list."""

    committed: Sequence[Committed]

    def token_ids(self, request: int, start: int = 0) -> list[int]:
        each = self.committed[request]
        return each.request.token_ids[start : each.length]

    def of(self, request: int, start: int = 0) -> Tensor:
        return torch.tensor(self.token_ids(request, start), dtype=torch.int64)

    def tail(self, num_tokens: int) -> Tensor:
        ends = [self.token_ids(b, max(each.length - num_tokens, 0)) for b, each in enumerate(self.committed)]
        padded = [[PADDING_TOKEN_ID] * (num_tokens - len(end)) + end for end in ends]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(ends), num_tokens)


@dataclass(frozen=True)
class DeviceHistory:
    """Read from a table on the device."""

    table: Tensor  # [max_num_seqs, max_model_len] int64, by slot
    slots: Tensor  # [B]
    lengths: Tensor  # [B]

    def token_ids(self, request: int, start: int = 0) -> list[int]:
        return self.of(request, start).tolist()

    def of(self, request: int, start: int = 0) -> Tensor:
        return self.table[self.slots[request], start : int(self.lengths[request])].clone()

    def tail(self, num_tokens: int) -> Tensor:
        places = self.lengths[:, None] + torch.arange(-num_tokens, 0, device=self.lengths.device)
        return self.table[self.slots[:, None], places.clamp(min=0)].masked_fill(places < 0, PADDING_TOKEN_ID)
