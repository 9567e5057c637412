"""The draft stream of one step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..kernels.backend import backend_of


@dataclass(frozen=True)
class StepRandom:
    """The draft stream of a step's requests: keys derived from their seeds, positions of their next tokens."""

    keys: Tensor  # [B] int64
    positions: Tensor  # [B] int64
    num_draft_tokens: int  # K: so many draws are made at once, with the first of them

    def uniform(self, draft_index: int) -> Tensor:
        """One number in (0, 1) per request for the draft token at `draft_index`: [B] float64."""
        if draft_index < self.num_draft_tokens:
            return self._of_a_draft[draft_index]
        return self._first(draft_index + 1)[draft_index]

    @cached_property
    def _of_a_draft(self) -> Tensor:  # [K, B]
        return self._first(self.num_draft_tokens)

    def _first(self, count: int) -> Tensor:
        return backend_of(self.keys.device.type).draft_uniforms(self.keys, self.positions, count)
