"""Draft passes on a device stay behind what the target computed, and the proposer hears of those that did not."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sdk.errors import ProposerError
from specdec.sdk.types import StepView

WHY = "the keys and values before are the target's own, and its text depends on them"


def early_pass(expected: str, found: str, **facts: str) -> ProposerError:
    """SD-E276."""
    told = {"expected": expected, "found": found, "why": WHY, **facts}
    return ProposerError("SD-E276", "a draft pass would write over what the target computed", told)


class EarlyPasses:
    """Begins passes at the newest token that would begin before it, and counts how far they were off.

    The host cannot look at where a pass begins without waiting for the device. So the counts of a step are sent to the
    host behind its drafts. They are there when the next step drafts, because its outcome was waited for in between.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._computed = torch.zeros(num_rows, dtype=torch.int64, device=device)  # by row: positions of the target
        self._missing = torch.zeros_like(self._computed)  # by row: positions that a pass of this step began too early
        self._sent: Tensor | None = None  # those of the step before, on the host

    def begin(self, step: StepView) -> None:
        """Passes of this step follow."""
        rows, computed = (each.to(self._computed.device) for each in (step.slots, step.kept.next_position))
        self._computed.index_copy_(0, rows, computed)
        self._missing.zero_()

    def end(self) -> None:
        """End the passes of this step: no more follow."""
        self._sent = self._missing.to("cpu", non_blocking=True, copy=True)

    def behind(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Starts [B] of a pass over rows [B], none of them early. It may be captured."""
        computed = self._computed[rows]
        self._missing.index_copy_(0, rows, torch.maximum(self._missing[rows], computed - starts))
        return torch.maximum(starts, computed)

    def require_none(self) -> None:
        """Raises ProposerError SD-E276 where a pass of the step before began too early."""
        missing = [] if self._sent is None else self._sent.tolist()
        found = {row: count for row, count in enumerate(missing) if count > 0}
        if found:
            named = ", ".join(f"{count} positions before in row {row}" for row, count in list(found.items())[:4])
            when = "the step before; its passes began at the newest tokens instead, and the text is right"
            raise early_pass("starts of at least `KeptTokens.next_position`", named, when=when)
