"""Min-p, top-k and top-p as one cutoff per row and new tile masses; nothing of vocabulary size is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..launch import WANTED_PROGRAMS

PIVOTS_OF_MANY = 16  # looked at in one pass by programs that share a row, for whom a pass is a launch
PIVOTS_OF_ONE = 4  # by a program that has the row to itself
KEY_BITS = {torch.float32: 32, torch.float16: 19, torch.bfloat16: 16}  # that tell values of this dtype apart in fp32


@dataclass(frozen=True)
class SearchScratch:
    """What the programs that share a row leave for its next pass. Rows are only shared while they are few."""

    state: Tensor  # [WANTED_PROGRAMS, 4] float64: what is searched, the keys it lies between, the amount wanted
    partial: Tensor  # [WANTED_PROGRAMS, PIVOTS_OF_MANY] float64, by program
    counter: Tensor  # [WANTED_PROGRAMS] int32, 0 between launches

    @classmethod
    def allocate(cls, device: torch.device) -> SearchScratch:
        return cls(
            state=torch.empty(WANTED_PROGRAMS, 4, dtype=torch.float64, device=device),
            partial=torch.empty(WANTED_PROGRAMS, PIVOTS_OF_MANY, dtype=torch.float64, device=device),
            counter=torch.zeros(WANTED_PROGRAMS, dtype=torch.int32, device=device),
        )


def num_passes(dtype: torch.dtype) -> int:
    """Launches that end both searches of every row of this dtype, and one for the new sums, where rows are shared."""
    bits_per_pass = PIVOTS_OF_MANY.bit_length() - 1
    return 2 * -(-KEY_BITS[dtype] // bits_per_pass) + 1
