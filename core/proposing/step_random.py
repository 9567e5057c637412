"""The draft stream of one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kernels.philox import Stream, uniform


@dataclass(frozen=True)
class StepRandom:
    """The draft stream of a step's requests: keys derived from their seeds, positions of their next tokens."""

    keys: Tensor  # [B] int64
    positions: Tensor  # [B] int64

    def uniform(self, draft_index: int) -> Tensor:
        """One number in (0, 1) per request for the draft token at `draft_index`: [B] float64."""
        return uniform(self.keys, self.positions, Stream.DRAFT, draft_index)
